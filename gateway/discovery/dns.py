"""Workers behind a DNS name that resolves to many addresses (compose, headless services).

Each address is a worker of its own. Only an answer changes anything: a resolver that fails or hangs
leaves the list as it was, and an address that an answer left out is kept for a while, because a
name with many addresses is often answered in part.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from gateway.config import DnsConfig
from gateway.discovery.base import Fault, Listing, Source, Tell, worker_url
from shared.errors import ConfigError

KEY = "discovery.dns.urls"
ANSWER_S = 5.0
"""A resolver that takes longer has failed."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""(host, port) -> its addresses, without brackets; raises ``OSError``."""


class Resolver:
    """The system's resolver, in threads of its own: one that hangs holds up nobody else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """See :data:`Resolve`."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return sorted({str(place[4][0]) for place in found})

    def close(self) -> None:
        """Waits for no thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def dns_names(config: DnsConfig) -> tuple[tuple[str, str, int, str], ...]:
    """(URL, host, port, path) of each configured name.

    :raises ConfigError: no URL, no port, or https (a certificate is for the name, and each worker
        is reached by its address).
    """
    names: list[tuple[str, str, int, str]] = []
    for text in config.urls:
        url = worker_url(KEY, text.strip())
        parts = urlsplit(url)
        if parts.scheme != "http":
            raise ConfigError(KEY, text, "must be http: workers are reached by their addresses")
        if any(name[0] == url for name in names):
            raise ConfigError(KEY, text, "is there twice")
        names.append((url, parts.hostname or "", parts.port or 80, parts.path))
    return tuple(names)


class DnsList:
    """Asks for all names again and again."""

    source = Source.DNS

    def __init__(
        self, config: DnsConfig, clock: Callable[[], float], resolve: Resolve | None = None
    ) -> None:
        """:raises ConfigError: see :func:`dns_names`."""
        self._config, self._clock = config, clock
        self._names = dns_names(config)
        self._own = Resolver() if resolve is None else None
        self._resolve: Resolve = resolve or self._own  # type: ignore[assignment]  # one is there
        self._seen: dict[str, dict[str, float]] = {}
        """Of each name: base URL -> when an answer held it last."""
        self._hanging: dict[str, asyncio.Task[list[str]]] = {}

    async def run(self, tell: Tell, fault: Fault) -> None:
        """Look for ever."""
        try:
            while True:
                reasons = await self.look()
                # before the first answer there is no list, and none must be made up
                if self._seen:
                    tell(self.listing())
                fault("; ".join(reasons))
                await asyncio.sleep(self._config.interval_s)
        finally:
            if self._own is not None:
                self._own.close()

    async def look(self) -> list[str]:
        """Ask for each name once; returns why some of them have no answer."""
        asked = await asyncio.gather(*(self._ask(*name) for name in self._names))
        return [reason for reason in asked if reason]

    def listing(self) -> Listing:
        """All addresses that are believed now."""
        return Listing({url: "" for seen in self._seen.values() for url in seen})

    async def _ask(self, url: str, host: str, port: int, path: str) -> str:
        task = self._hanging.pop(url, None)
        if task is None:
            task = asyncio.ensure_future(self._resolve(host, port))
        done, _ = await asyncio.wait({task}, timeout=ANSWER_S)
        if not done:
            self._hanging[url] = task
            return f"{host}: no answer from the resolver"
        try:
            addresses = task.result()
        except (OSError, UnicodeError) as error:
            return f"{host}: {getattr(error, 'strerror', None) or error}"
        if not addresses:
            return f"{host}: no address"
        self._note(url, {_base(address, port, path) for address in addresses})
        return ""

    def _note(self, url: str, found: set[str]) -> None:
        now = self._clock()
        seen = self._seen.setdefault(url, {})
        seen.update(dict.fromkeys(found, now))
        for base, at in list(seen.items()):
            if base not in found and now - at >= self._config.forget_s:
                del seen[base]


def _base(address: str, port: int, path: str) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}{path}"
