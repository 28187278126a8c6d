"""Settings of one policy: the table ``[routing.options.NAME]`` as a typed struct."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from gateway.config import RoutingConfig
from shared.errors import ConfigError

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]

S = TypeVar("S", bound=msgspec.Struct)


class NoOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Of a policy that has no settings: a table with some would be without effect."""


def options_of(config: RoutingConfig, policy: str, kind: type[S]) -> S:
    """What was set for a policy; ``kind`` should forbid unknown fields.

    :raises ConfigError: a name or value that does not fit.
    """
    given = config.options.get(policy, {})
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        key = f"routing.options.{policy}{path.rstrip('`')}"
        name = path.strip("`.")
        raise ConfigError(key, given.get(name, given), reason) from None
