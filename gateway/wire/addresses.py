"""From a host's name to a connected socket: one look-up for many connections, addresses raced."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

LOOKUP_KEPT_S = 10.0
DELAY_S = 0.25
"""RFC 8305: how long an address has before the next one is tried beside it."""
_MAX_KEPT = 1024


class Addresses:
    """Remembers look-ups for :data:`LOOKUP_KEPT_S`; those under way are shared."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        allows: Callable[[str, str], bool] = lambda host, address: True,
    ) -> None:
        """``allows``: whether a connection to a host may go to one of its addresses."""
        self._loop, self._allows = loop, allows
        self._known: dict[tuple[str, int], tuple[float, list[AddrInfoType]]] = {}
        self._asked: dict[tuple[str, int], asyncio.Task[list[AddrInfoType]]] = {}

    async def socket(self, host: str, port: int) -> socket.socket:
        """A connected, non-blocking socket. Raises ``OSError``."""
        found = await self._resolve(host, port)
        return await aiohappyeyeballs.start_connection(
            found, happy_eyeballs_delay=DELAY_S, interleave=1, loop=self._loop
        )

    async def _resolve(self, host: str, port: int) -> list[AddrInfoType]:
        key = (host, port)
        known = self._known.get(key)
        if known is not None and self._loop.time() - known[0] < LOOKUP_KEPT_S:
            return known[1]
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = self._loop.create_task(self._look_up(key), name="look-up")
            task.add_done_callback(_seen)
        # A caller that gives up must not take the look-up from the others.
        return await asyncio.shield(task)

    async def _look_up(self, key: tuple[str, int]) -> list[AddrInfoType]:
        try:
            found: list[AddrInfoType] = [
                one
                for one in await self._loop.getaddrinfo(*key, type=socket.SOCK_STREAM)
                if self._allows(key[0], str(one[4][0]))
            ]
        finally:
            del self._asked[key]
        if not found:
            raise OSError("the name leads to no address that may be reached")
        if len(self._known) >= _MAX_KEPT:
            self._known.clear()
        self._known[key] = (self._loop.time(), found)
        return found


def _seen(task: asyncio.Task[list[AddrInfoType]]) -> None:
    """A failure that all callers left before it came is no fault worth a log line."""
    if not task.cancelled():
        task.exception()
