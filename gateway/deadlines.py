"""When requests must have been answered: one timer for all of them.

Nearly every request ends long before its time, so setting and taking back a timer of its own would
be most of what its time limit costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_GRAIN_S = 0.001
"""A loop's clock may stand still for so long."""


class Deadlines(Generic[T]):
    """Calls ``late`` with each item whose time is over. Of one event loop."""

    def __init__(self, late: Callable[[T], None]) -> None:
        self._late = late
        self._due: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = inf

    def add(self, item: T, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        """Its time is over in so many seconds, unless it is done before."""
        self._due[item] = at = loop.time() + seconds
        if at < self._looks_at:
            self._look_at(at, loop)

    def done(self, item: T) -> None:
        """It needs no more time. The timer finds out."""
        self._due.pop(item, None)

    def _look_at(self, at: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at, self._timer = at, loop.call_at(at, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looks_at, self._timer = inf, None
        now = loop.time() + _GRAIN_S
        for item in [item for item, at in self._due.items() if at <= now]:
            del self._due[item]
            self._late(item)
        if self._due:
            self._look_at(min(self._due.values()), loop)
