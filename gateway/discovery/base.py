"""Where workers come from. A source only says where somebody may be; who it is, the address tells.

A source hands out sightings; it never says that a worker is dead. That is judged from probes, and
for workers that registered themselves also from their lease.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

from shared.errors import ConfigError
from shared.load import WorkerInfo, WorkerLoad
from shared.types import Epoch, WorkerId


class Source(StrEnum):
    """Who named a worker.

    ``REDIS`` alone lets it go when its lease is gone and it does not answer; a list lets it go when
    it names it no longer; ``ADMIN`` keeps it, down or not.
    """

    STATIC = "static"
    REDIS = "redis"
    ADMIN = "admin"
    DNS = "dns"
    FILE = "file"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A worker's registration, as one look into a source found it."""

    info: WorkerInfo
    epoch: Epoch
    seq: int
    """Last event batch that it had published."""
    load: WorkerLoad | None
    """None: not told, or the same as at the look before."""


@dataclass(frozen=True, slots=True)
class Look:
    """Everything that one look into a source found."""

    sightings: dict[WorkerId, Sighting]
    listed: frozenset[WorkerId]
    """Names in the source's lists, with a lease or without."""
    unreadable: Mapping[WorkerId, str] = field(default_factory=dict)
    """Registrations that could not be read, and why not."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All that a list names at one moment. An address that is not in it is named no longer."""

    workers: Mapping[str, str]
    """Base URL -> why it takes no new requests; empty: it may take some."""


Tell = Callable[[Listing], None]
"""Takes the whole list, each time it may have changed."""
Fault = Callable[[str], None]
"""Takes why the list cannot be had now; empty: it can. What was told before stays in force."""


class ListSource(Protocol):
    """A list of workers that is kept up to date."""

    @property
    def source(self) -> Source:
        """Which one."""
        ...

    async def run(self, tell: Tell, fault: Fault) -> None:
        """Follow the list until cancelled. An outage is told and survived, never raised."""
        ...


def holds_space(url: str) -> bool:
    """Whether a URL holds what none may: such a name would be looked up, and never be found."""
    return any(char.isspace() or not char.isprintable() for char in url)


def worker_url(key: str, text: str) -> str:
    """A worker's base URL without trailing slash.

    :raises ConfigError: no http(s) URL with a host; ``key`` is named in the message.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(key, text, str(error)) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or holds_space(text):
        raise ConfigError(key, text, "must look like http://host:port")
    if parts.username is not None or parts.password is not None:
        # Addresses are shown in logs and metrics, where no password may stand.
        hidden = f"{parts.scheme}://***@{parts.hostname}"
        raise ConfigError(key, hidden, "must not hold a user or password: use workers.api_key")
    if parts.query or parts.fragment:
        raise ConfigError(key, text, "must not have a query or a fragment")
    if port == 0:
        raise ConfigError(key, text, "port 0 is no address")
    return text.rstrip("/")


def address_of(url: str) -> str:
    """``host:port`` of a base URL."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
