"""Prompts that a worker is about to hold: booked there, but not yet in the index.

A burst of siblings arrives before the first of them has been computed. What the leader was sent for
is *promised* on its worker until its attempt ends, plus a short linger for the cache events to
arrive; if the attempt fails, its promise is gone at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import msgspec

from shared.types import BlockKey, WorkerId

_EVERY = 32
"""A promise is found by its first key and by one in so many of the others."""


class Promise(msgspec.Struct, frozen=True, eq=False):
    """Keys that one attempt adds to its worker, beyond what was indexed there when it began."""

    worker: WorkerId
    keys: Sequence[BlockKey]
    """Of the whole prompt."""
    start: int
    """Those before it were indexed."""
    marks: Sequence[BlockKey] = ()
    """The keys by which it is found."""

    def shared(self, keys: Sequence[BlockKey], known: int) -> int:
        """Up to where it and another prompt are the same; ``keys[known]`` is."""
        mine = self.keys
        high = min(len(mine), len(keys))
        if mine[high - 1] == keys[high - 1]:
            return high
        low = known + 1
        while low < high:
            middle = (low + high) // 2
            if mine[middle] == keys[middle]:
                low = middle + 1
            else:
                high = middle
        return low


class Promises:
    """All promises of this gateway, by worker and key. A key stands for all that comes before it.

    :param linger_s: how long a kept promise still counts after its attempt.
    """

    def __init__(self, linger_s: float = 1.0) -> None:
        self._linger_s = linger_s
        self._found: dict[WorkerId, dict[BlockKey, tuple[Promise] | list[Promise]]] = {}
        """One that shares no mark with others stands at all of its own as one and the same tuple,
        for that takes no look at each."""
        self._open: dict[WorkerId, set[Promise]] = {}
        self._lingering: deque[tuple[float, Promise]] = deque()

    def make(self, worker: WorkerId, keys: Sequence[BlockKey], indexed: int, now: float) -> Promise:
        """Promise ``keys[indexed:]``; ``indexed`` granules are in the worker's index already."""
        if self._lingering:
            self.expire(now)
        if indexed >= len(keys):
            return Promise(worker, keys, indexed)
        marks = [keys[indexed], *keys[(indexed // _EVERY + 1) * _EVERY :: _EVERY]]
        promise = Promise(worker, keys, indexed, marks)
        found = self._found.get(worker)
        if found is None:
            found, self._open[worker] = {}, set()
            self._found[worker] = found
        self._open[worker].add(promise)
        if len(marks) > 1 and found.keys().isdisjoint(marks):
            found.update(dict.fromkeys(marks, (promise,)))
        else:
            for key in marks:
                sharing = found.get(key, ())
                if type(sharing) is list:
                    sharing.append(promise)
                else:
                    found[key] = [*sharing, promise]
        return promise

    def keep(self, promise: Promise, now: float) -> None:
        """The attempt ended well: its keys count for a little longer."""
        self.expire(now)
        if promise.start < len(promise.keys):
            self._lingering.append((now + self._linger_s, promise))

    def break_off(self, promise: Promise) -> None:
        """The attempt failed: nobody should wait for its keys."""
        standing = self._open.get(promise.worker)
        if standing is None or promise not in standing:
            return
        standing.discard(promise)
        if not standing:
            # Nothing else is promised there: no need to take it out key by key.
            del self._open[promise.worker], self._found[promise.worker]
            return
        found = self._found[promise.worker]
        for key in promise.marks:
            sharing = found[key]
            if len(sharing) == 1:
                del found[key]
            elif type(sharing) is list:
                sharing.remove(promise)

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone or empty: so is all that was promised there."""
        self._open.pop(worker, None)
        self._found.pop(worker, None)

    def workers(self) -> Collection[WorkerId]:
        """Workers on which something is promised."""
        return self._found.keys()

    def extend(self, worker: WorkerId, keys: Sequence[BlockKey], indexed: int) -> int:
        """Granules of ``keys`` that the worker holds or will hold, given that it holds ``indexed``.

        Only a promise that begins where the worker's index ends, or before, says so. Pure.
        """
        found, ahead, size = self._found.get(worker), indexed, len(keys)
        if found is None or indexed >= size:
            return indexed
        for at in range(indexed - indexed % _EVERY, indexed + 1):
            for promise in found.get(keys[at], ()):
                # Of many siblings nearly all end here.
                if ahead < len(promise.keys) and promise.keys[ahead] == keys[ahead]:
                    ahead = promise.shared(keys, ahead)
                    if ahead == size:
                        return size
        return ahead

    def reach(self, worker: WorkerId, keys: Sequence[BlockKey], seen: int, indexed: int) -> int:
        """Granules of ``keys`` that prompts promised there begin with, in the index or not, if that
        is more than ``seen``. ``indexed``: up to where to look for one. Pure."""
        found = self._found.get(worker)
        if found is None:
            return seen
        for at in range(min(indexed, len(keys)) - 1, seen - 1, -1):
            if sharing := found.get(keys[at]):
                return max(promise.shared(keys, at) for promise in sharing)
        return seen

    def expire(self, now: float) -> None:
        """Let go of kept promises whose time is over."""
        while self._lingering and self._lingering[0][0] <= now:
            self.break_off(self._lingering.popleft()[1])
