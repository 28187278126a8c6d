"""Tenants: whose key it is, which salt keeps its prompts apart, and how much it may ask. Pure.

The salt is derived here, never chosen by a client: it holds the tenant's scope and what the client
itself gave as ``cache_salt``, each with its length in front. So a client can make its scope
narrower and never wider, and guessing another tenant's salt is of no use. It goes into the block
keys (so the index, promises and predictions are per tenant as well) and, where the engine
understands one, into the request.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from gateway.decision import WorkerStatus
from gateway.engines.base import Salting
from gateway.engines.catalogue import engine
from shared.errors import RateLimited
from shared.openai import GenerateRequest

_MINUTE_S = 60.0
_SALT_BYTES = 18
_VERSION = b"headwater tenant salt 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a tenant may ask; 0 = no limit."""

    requests_per_minute: float = 0.0
    prompt_tokens_per_minute: float = 0.0
    concurrent: int = 0

    @property
    def any(self) -> bool:
        """There is one."""
        return bool(self.concurrent or self.requests_per_minute or self.prompt_tokens_per_minute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who asks."""

    name: str
    """For logs, records and fairness."""
    scope: bytes
    """What the salt is made of; tenants with one scope share their cache. Empty: no salt."""
    limits: Limits = field(default_factory=Limits)


NOBODY = Tenant(name="", scope=b"")
"""Who asks where no key is needed."""


def digest(key: bytes) -> bytes:
    """Under which a key is known here: keys themselves are not kept."""
    return hashlib.sha256(key).digest()


class Tenants:
    """All of them, by their keys.

    :param keys: digest of each key -> its tenant; empty: nobody needs one.
    :param secret: keys the salts, the same in all gateways of a deployment.
    :param isolate: prompts of different tenants are kept apart.
    """

    def __init__(self, keys: Mapping[bytes, Tenant], secret: bytes, *, isolate: bool) -> None:
        self._keys, self._secret, self._isolate = dict(keys), secret, isolate
        self._by_name = {tenant.name: tenant for tenant in keys.values()}

    @property
    def needed(self) -> bool:
        """Requests need a key."""
        return bool(self._keys)

    @property
    def isolating(self) -> bool:
        """Some prompts get a salt."""
        return self._isolate and any(tenant.scope for tenant in self._by_name.values())

    @property
    def apart(self) -> bool:
        """There are prompts of different tenants that must not meet in a cache. Pure."""
        return self._isolate and len({tenant.scope for tenant in self._by_name.values()}) > 1

    def of_key(self, key: bytes) -> Tenant | None:
        """Whose key it is. Looked up by its digest, so that the time tells nothing about others."""
        return self._keys.get(digest(key))

    def salt(self, name: str, own: str) -> str:
        """The salt of a tenant's prompt; ``own``: what the client gave. Empty: none."""
        tenant = self._by_name.get(name, NOBODY)
        if not self._isolate or not tenant.scope:
            return own
        client = own.encode("utf-8", "surrogatepass")
        parts = b"".join(len(part).to_bytes(4, "big") + part for part in (tenant.scope, client))
        code = hmac.digest(self._secret, _VERSION + parts, "sha256")[:_SALT_BYTES]
        return urlsafe_b64encode(code).decode()

    def scoped(self, name: str, request: GenerateRequest) -> GenerateRequest:
        """A tenant's request under its salt. Pure."""
        own = request.cache_salt or ""
        salt = self.salt(name, own)
        return request if salt == own else msgspec.structs.replace(request, cache_salt=salt)

    def known(self, name: str) -> bool:
        """There is a tenant of this name. Pure."""
        return name in self._by_name

    def limits(self, name: str) -> Limits:
        """What a tenant may ask. Pure."""
        return self._by_name.get(name, NOBODY).limits


@dataclass(slots=True)
class _Meter:
    running: int = 0
    requests: float = 0.0
    """Of this minute's allowance, used; it flows back evenly."""
    tokens: float = 0.0
    at: float = 0.0

    def flow(self, limits: Limits, now: float) -> None:
        """Let time pass."""
        passed = max(0.0, now - self.at) / _MINUTE_S
        self.at = now
        self.requests = max(0.0, self.requests - passed * limits.requests_per_minute)
        self.tokens = max(0.0, self.tokens - passed * limits.prompt_tokens_per_minute)


AT_A_TIME, REQUESTS, TOKENS = 1, 2, 3
"""Which limit refuses."""


def refusal(what: int, limits: Limits, wait_s: float) -> RateLimited | None:
    """The error for a limit that was met (:data:`AT_A_TIME`, ...; 0: none was). Pure."""
    if what == AT_A_TIME:
        return RateLimited(
            f"{limits.concurrent} requests of this key are running, the most it may have.",
            code="concurrency_limit",
            retry_after_s=wait_s,
        )
    if what not in (REQUESTS, TOKENS):
        return None
    rate, unit = limits.requests_per_minute, "requests"
    if what == TOKENS:
        rate, unit = limits.prompt_tokens_per_minute, "prompt tokens"
    return RateLimited(
        f"This key may ask {rate:g} {unit} a minute.",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )


class Meters:
    """How much each tenant has used, at this gateway. Outlives a change of the configuration."""

    def __init__(self) -> None:
        self._meters: dict[str, _Meter] = {}

    def enter(self, name: str, limits: Limits, tokens: int, now: float) -> None:
        """A request begins whose prompt has so many tokens (0 = not known).

        Raises :class:`RateLimited`, and then it has not begun. A prompt beyond a minute's allowance
        waits for all of it.
        """
        meter = self._meters.setdefault(name, _Meter(at=now))
        meter.flow(limits, now)
        what, wait_s = 0, 0.0
        if limits.concurrent and meter.running >= limits.concurrent:
            what, wait_s = AT_A_TIME, 1.0
        else:
            for kind, rate, used, asked in (
                (REQUESTS, limits.requests_per_minute, meter.requests, 1.0),
                (TOKENS, limits.prompt_tokens_per_minute, meter.tokens, float(tokens)),
            ):
                over = used + min(asked, max(1.0, rate)) - max(1.0, rate)
                if rate and over > 1e-9:
                    what, wait_s = kind, over / rate * _MINUTE_S
                    break
        refused = refusal(what, limits, wait_s)
        if refused is not None:
            raise refused
        self._add(meter, tokens)

    def note(self, name: str, limits: Limits, tokens: int, now: float) -> None:
        """The same of a request that was let in elsewhere."""
        meter = self._meters.setdefault(name, _Meter(at=now))
        meter.flow(limits, now)
        self._add(meter, tokens)

    def count(self, name: str) -> None:
        """A request begins that no limit is for: only that it runs is of interest."""
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = _Meter()
        meter.running += 1

    def _add(self, meter: _Meter, tokens: int) -> None:
        meter.requests += 1
        meter.tokens += tokens
        meter.running += 1

    def leave(self, name: str) -> None:
        """A request that entered is over."""
        meter = self._meters.get(name)
        if meter is not None:
            meter.running -= 1

    def running(self, name: str) -> int:
        """Requests that have entered and not left. Pure."""
        meter = self._meters.get(name)
        return 0 if meter is None else meter.running


def cannot_isolate(make: str) -> str:
    """Why an engine cannot keep tenants apart; empty if it can. Pure."""
    if engine(make).salting is not Salting.NONE:
        return ""
    return f"tenants would share the prefix cache of {make}: it understands no cache_salt"


def shared_caches(workers: Iterable[WorkerStatus]) -> list[str]:
    """One line for each make of engine that cannot keep tenants apart. Pure."""
    names: dict[str, list[str]] = {}
    for worker in workers:
        if cannot_isolate(worker.engine):
            names.setdefault(worker.engine, []).append(worker.id)
    return [
        f"tenants share the prefix cache of {make} ({', '.join(sorted(found)[:3])}"
        f"{', ...' if len(found) > 3 else ''}): it understands no cache_salt"
        for make, found in names.items()
    ]


def plain_keys(keys: Iterable[str], limits: Limits) -> dict[bytes, Tenant]:
    """Keys without names: each is a tenant of its own, whatever its place in the list."""
    made: dict[bytes, Tenant] = {}
    for number, key in enumerate(keys, 1):
        code = digest(key.encode())
        made.setdefault(code, Tenant(name=f"key{number}", scope=b"key:" + code, limits=limits))
    return made
