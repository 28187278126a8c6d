"""The dashboard's stream of states, where a state has to be asked for first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from gateway.dashboard.pages import EVERY_S, FRESH_S, MOST_WATCHERS, head
from shared.errors import NoCapacity


class StateStream:
    """Watchers share states: however many there are, one is made each second.

    :param make: the present state, in JSON terms; raises ``NoCapacity`` if there is none.
    """

    def __init__(
        self, make: Callable[[], Awaitable[Any]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make, self._clock = make, clock
        self._making = asyncio.Lock()
        self._state = b""
        self._made = -FRESH_S
        self._watchers = 0

    async def stream(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send states until the watcher leaves; raises ``NoCapacity``."""
        if self._watchers >= MOST_WATCHERS:
            raise NoCapacity("Too many dashboards are open.", retry_after_s=10.0)
        await self._fresh()
        self._watchers += 1
        try:
            return await self._send(request)
        finally:
            self._watchers -= 1

    async def _fresh(self) -> bytes:
        async with self._making:
            if self._clock() - self._made >= FRESH_S:
                self._state = msgspec.json.encode(await self._make())
                self._made = self._clock()
        return self._state

    async def _send(self, request: web.BaseRequest) -> web.StreamResponse:
        response = head()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"event: state\ndata: " + await self._fresh() + b"\n\n")
                await asyncio.sleep(EVERY_S)
        except (ConnectionError, NoCapacity):  # the page connects again
            return response
