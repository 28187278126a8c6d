"""The file of API keys: whose they are and what they may ask. Keys stand in it as SHA-256.

[[keys]]
sha256 = "9f86d081..."        # or key = "sk-..." in plain
tenant = "search"

[tenants.search]              # all optional
requests_per_minute = 600
prompt_tokens_per_minute = 2_000_000
concurrent = 40
group = "shop"                # tenants of one group share their cache
shared = false                # true: no salt, its prompts are in the cache that all share
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from gateway.config import TenancyConfig
from gateway.tenancy import Limits, Tenant, digest
from shared.errors import ConfigError

Limit = Annotated[float, msgspec.Meta(ge=0)]
KEY = "tenancy.keys_file"


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    tenant: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")] = ""
    key: str = ""


class _Tenant(msgspec.Struct, forbid_unknown_fields=True):
    requests_per_minute: Limit | None = None
    prompt_tokens_per_minute: Limit | None = None
    concurrent: Annotated[int, msgspec.Meta(ge=0)] | None = None
    group: str = ""
    shared: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Key] = []
    tenants: dict[str, _Tenant] = {}


def read_keys(config: TenancyConfig) -> dict[bytes, Tenant]:
    """Tenants by the digest of their keys; empty without a file.

    :raises ConfigError: the file cannot be read or makes no sense.
    """
    if not config.keys_file:
        return {}
    path = Path(config.keys_file)
    try:
        told = msgspec.convert(tomllib.loads(path.read_text()), _File)
    except OSError as error:
        raise ConfigError(KEY, str(path), error.strerror or "cannot be read") from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        # A message about a value may quote it, and the value may be a key.
        raise ConfigError(KEY, str(path), f"is not valid: {_without_values(error)}") from error
    found: dict[bytes, Tenant] = {}
    for number, one in enumerate(told.keys, 1):
        if bool(one.sha256) == bool(one.key):
            raise ConfigError(KEY, str(path), f"key {number} needs either 'sha256' or 'key'")
        code = bytes.fromhex(one.sha256) if one.sha256 else digest(one.key.encode())
        if code in found:
            raise ConfigError(KEY, str(path), f"key {number} stands in it twice")
        found[code] = _tenant(one.tenant, told.tenants.get(one.tenant, _Tenant()), config)
    unknown = sorted(told.tenants.keys() - {one.tenant for one in told.keys})
    if unknown:
        raise ConfigError(KEY, str(path), f"tenant '{unknown[0]}' has no key")
    return found


def default_limits(config: TenancyConfig) -> Limits:
    """What a tenant may ask whose own limits are not given."""
    return Limits(
        requests_per_minute=config.requests_per_minute,
        prompt_tokens_per_minute=config.prompt_tokens_per_minute,
        concurrent=config.concurrent,
    )


def _tenant(name: str, told: _Tenant, config: TenancyConfig) -> Tenant:
    usual = default_limits(config)
    requests, tokens, most = (
        told.requests_per_minute,
        told.prompt_tokens_per_minute,
        told.concurrent,
    )
    scope = f"group:{told.group}" if told.group else f"tenant:{name}"
    return Tenant(
        name=name,
        scope=b"" if told.shared else scope.encode(),
        limits=Limits(
            requests_per_minute=usual.requests_per_minute if requests is None else requests,
            prompt_tokens_per_minute=usual.prompt_tokens_per_minute if tokens is None else tokens,
            concurrent=usual.concurrent if most is None else most,
        ),
    )


def _without_values(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return str(error).splitlines()[0]
    return "no UTF-8" if isinstance(error, UnicodeDecodeError) else "no valid TOML"
