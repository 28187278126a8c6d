"""Prompts that a worker is about to hold: booked there, but not yet in the index.

A burst of siblings arrives before the first of them has been computed. What the leader was sent for
is *promised* on its worker until its attempt ends, plus a short linger for the cache events to
arrive; if the attempt fails, its promise is gone at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence

import msgspec

from shared.types import BlockKey, WorkerId

_FEW = 8
"""Up to so many keys it costs less to touch them one by one."""


class Promise(msgspec.Struct, frozen=True, eq=False):
    """Keys that one attempt adds to its worker, beyond what was indexed there when it began."""

    worker: WorkerId
    keys: Sequence[BlockKey]


class Promises:
    """All promises of this gateway, counted per worker and key.

    :param linger_s: how long a kept promise still counts after its attempt.
    """

    def __init__(self, linger_s: float = 1.0) -> None:
        self._linger_s = linger_s
        self._counts: dict[WorkerId, Counter[BlockKey]] = {}
        self._open: dict[WorkerId, set[Promise]] = {}
        self._lingering: deque[tuple[float, Promise]] = deque()

    def make(self, worker: WorkerId, keys: Sequence[BlockKey], indexed: int, now: float) -> Promise:
        """Promise ``keys[indexed:]``; ``indexed`` granules are in the worker's index already."""
        if self._lingering:
            self.expire(now)
        promise = Promise(worker, keys[indexed:])
        if promise.keys:
            counts = self._counts.get(worker)
            if counts is None:
                counts, self._open[worker] = Counter(), set()
                self._counts[worker] = counts
            self._open[worker].add(promise)
            if len(promise.keys) > _FEW:
                counts.update(promise.keys)
            else:  # what a Counter does in Python takes longer than this
                for key in promise.keys:
                    counts[key] = counts.get(key, 0) + 1
        return promise

    def keep(self, promise: Promise, now: float) -> None:
        """The attempt ended well: its keys count for a little longer."""
        self.expire(now)
        if promise.keys:
            self._lingering.append((now + self._linger_s, promise))

    def break_off(self, promise: Promise) -> None:
        """The attempt failed: nobody should wait for its keys."""
        standing = self._open.get(promise.worker)
        if standing is None or promise not in standing:
            return
        standing.discard(promise)
        if not standing:
            # Nothing else is promised there: no need to count down key by key.
            del self._open[promise.worker], self._counts[promise.worker]
            return
        counts, keys = self._counts[promise.worker], promise.keys
        if len(keys) > _FEW and set(map(counts.get, keys)) == {1}:  # nobody else's: all at once
            deque(map(counts.pop, keys), maxlen=0)
            return
        for key in keys:
            left = counts[key] - 1
            if left:
                counts[key] = left
            else:
                counts.pop(key)

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone or empty: so is all that was promised there."""
        self._open.pop(worker, None)
        self._counts.pop(worker, None)

    def workers(self) -> Collection[WorkerId]:
        """Workers on which something is promised."""
        return self._counts.keys()

    def extend(self, worker: WorkerId, keys: Sequence[BlockKey], indexed: int) -> int:
        """Granules of ``keys`` that the worker holds or will hold, given that it holds ``indexed``.

        Promises run from what was indexed to the end of a prompt, so beyond ``indexed`` they are
        closed under taking prefixes and a bisection finds their end. Pure.
        """
        counts = self._counts.get(worker)
        if counts is None or indexed >= len(keys) or keys[indexed] not in counts:
            return indexed
        low, high = indexed + 1, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in counts:
                low = middle + 1
            else:
                high = middle
        return low

    def expire(self, now: float) -> None:
        """Let go of kept promises whose time is over."""
        while self._lingering and self._lingering[0][0] <= now:
            self.break_off(self._lingering.popleft()[1])
