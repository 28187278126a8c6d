"""A changed configuration: which keys a running gateway takes over, and which wait for a restart.

re-read   SIGHUP, or the file is another one than before
checked   as at the start; a configuration that could not start a gateway changes nothing
applied   the worker list, discovery, policy, limits, log level; of the rest the names are told
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.config import GatewayConfig
from shared.layers import leaves, struct_of

RELOADABLE = (
    *("workers.urls", "workers.request_timeout_s", "discovery."),
    *("admission.", "tenancy."),
    *("routing.policy", "routing.options", "routing.allow_policy_header", "routing.retries"),
    *("routing.prefix_hash_tokens", "routing.prefix_hash_load_factor"),
    *("listen.max_body_mib", "listen.headers", "listen.api_keys", "listen.drain_s"),
    "log.level",
)
"""Keys, or beginnings of keys, that end in a dot."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What another configuration means for a running gateway."""

    config: GatewayConfig
    """The present one with all that can be taken over."""
    applied: tuple[str, ...]
    """Keys that were taken over."""
    pending: tuple[str, ...]
    """Keys that a restart would change."""

    def touches(self, prefix: str) -> bool:
        """Whether a key of a section was taken over."""
        return any(key.startswith(prefix) for key in self.applied)


def is_reloadable(key: str) -> bool:
    """Whether a running gateway can take a key over."""
    return any(key.startswith(one) if one.endswith(".") else key == one for one in RELOADABLE)


def compare(present: GatewayConfig, wanted: GatewayConfig) -> Changes:
    """What changes between two configurations. Pure."""
    before, after = values(present), values(wanted)
    changed = [key for key in before if before[key] != after[key]]
    applied = tuple(key for key in changed if is_reloadable(key))
    pending = tuple(key for key in changed if not is_reloadable(key))
    merged = {**before, **{key: after[key] for key in applied}}
    return Changes(_build(GatewayConfig, "", merged), applied, pending)


def values(config: msgspec.Struct) -> dict[str, Any]:
    """All values by their dotted keys."""
    found: dict[str, Any] = {}
    for key, _ in leaves(type(config)):
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        found[key] = value
    return found


def _build(cls: type[Any], prefix: str, table: Mapping[str, Any]) -> Any:
    parts = {}
    for field in msgspec.structs.fields(cls):
        section = struct_of(field.type)
        path = prefix + field.name
        parts[field.name] = table[path] if section is None else _build(section, path + ".", table)
    return cls(**parts)
