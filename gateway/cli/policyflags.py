"""The flags by which policies are named: ``--policy NAME`` and ``--option NAME.KEY=VALUE``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.config import RoutingConfig
from gateway.plugins import find_policy, make_checked, policy_names
from gateway.routing.base import Policy
from gateway.routing.catalogue import FACTORIES, Factory
from gateway.routing.cost import CostModel
from shared.errors import ConfigError

ALL = "all"
POLICY_HELP = f"Any of {', '.join(FACTORIES)}, a plug-in, module:Class or all; repeat it."
OPTION_HELP = "A setting of a policy, NAME.KEY=VALUE (docs/policies.md); repeat it."


def policies_of(names: Sequence[str], options: Sequence[str]) -> dict[str, Factory]:
    """Each policy once, in the order given, with its options; commas and ``all`` are allowed.

    :raises ConfigError: a name or an option that does not exist, or a plug-in that is none.
    """
    config = RoutingConfig(options=_options(options))
    wanted: list[str] = []
    for name in (part.strip() for given in names for part in given.split(",")):
        wanted += policy_names() if name == ALL else [name]
    policies: dict[str, Factory] = {}
    known_as: set[str] = set()
    for name in dict.fromkeys(wanted):
        factory = _with(find_policy(name, "--policy"), config)
        made = factory(config, CostModel())
        if name not in FACTORIES:
            made = make_checked(factory, name, config, "--policy")
        known_as.add(made.name)
        policies[name] = factory
    for name in config.options:
        if name not in known_as:
            reason = f"no such policy runs: {', '.join(sorted(known_as))}"
            raise ConfigError("--option", name, reason)
    return policies


def _with(factory: Factory, config: RoutingConfig) -> Factory:
    def make(_: RoutingConfig, cost: CostModel) -> Policy:
        return factory(config, cost)

    return make


def _options(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {}
    for one in given:
        path, equals, text = one.partition("=")
        policy, dot, key = path.strip().rpartition(".")
        if not (equals and dot and policy and key):
            raise ConfigError("--option", one, "must be NAME.KEY=VALUE")
        options.setdefault(policy, {})[key] = _value(text.strip())
    return options


def _value(text: str) -> bool | int | float | str:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text
    return value if isinstance(value, bool | int | float) else text
