"""What a worker without cache events holds, learned from the requests it served.

A served prompt is in the worker's cache: its keys enter the index under our own source name. They
leave it by *insertion distance*, not by time: when more tokens have been inserted since than the
worker can hold. ``cached_tokens`` corrects that capacity: a shortfall at some distance says that
the cache is smaller, a hit near the end of the believed range that it may be larger. Not reported
is not zero: a worker that never reports anything is called *blind*.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.blocks import GRANULE
from shared.events import CacheCleared, CacheEvent, EventBatch, removed, stored
from shared.types import BlockKey, Epoch, WorkerId

SOURCE = "gateway"
"""Name under which learned contents are numbered in the index."""
DEFAULT_CAPACITY_TOKENS = 200_000
_MIN_CAPACITY_TOKENS = 1_024
_MUTE_AFTER = 32
"""Answers without ``cached_tokens``, though a match was expected, until a worker counts as mute."""
_SHRINK = 0.3
_GROW = 1.05


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request on a learned worker."""

    keys: Sequence[BlockKey]
    """One per full granule of the prompt."""
    prompt_tokens: int
    output_tokens: int
    expected_tokens: int
    """Usable match that had been predicted from the index, promises aside."""
    cached_tokens: int | None


@dataclass(slots=True)
class _Memory:
    epoch: Epoch
    stride: int
    capacity: float
    seq: int = 0
    inserted: int = 0
    """Tokens computed there so far: the clock of insertion distance."""
    touched: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Key -> ``inserted`` when it was touched last; oldest first, leaves before their ancestors."""
    reported: bool = False
    unreported: int = 0


class Learner:
    """Turns answered requests into event batches for the index."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Memory] = {}

    def join(self, worker: WorkerId, epoch: Epoch, stride: int, capacity_tokens: int) -> None:
        """A worker starts empty. ``capacity_tokens``: of its KV cache; 0 = unknown."""
        self._workers[worker] = _Memory(
            epoch, stride, float(capacity_tokens or DEFAULT_CAPACITY_TOKENS)
        )

    def knows(self, worker: WorkerId) -> bool:
        """It has joined and was not forgotten."""
        return worker in self._workers

    def cleared(self, worker: WorkerId) -> EventBatch | None:
        """Somebody saw that it restarted: it holds nothing of what was learned."""
        memory = self._workers.get(worker)
        if memory is None or not memory.touched:
            return None
        memory.touched.clear()
        memory.seq += 1
        events = (CacheCleared(),)
        return EventBatch(worker, memory.epoch, SOURCE, memory.seq, 0.0, memory.stride, events)

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self._workers.pop(worker, None)

    def reset(self, worker: WorkerId) -> None:
        """Its own events have replaced what was learned."""
        memory = self._workers.get(worker)
        if memory is not None:
            memory.touched.clear()

    def resize(self, worker: WorkerId, capacity_tokens: int) -> None:
        """The worker told its capacity: an upper bound for what is believed."""
        memory = self._workers.get(worker)
        if memory is not None and capacity_tokens > 0:
            memory.capacity = min(memory.capacity, float(capacity_tokens))

    def mute(self, worker: WorkerId) -> bool:
        """It never reported ``cached_tokens`` although it should have had something to report."""
        memory = self._workers.get(worker)
        return memory is not None and not memory.reported and memory.unreported >= _MUTE_AFTER

    def capacity_tokens(self, worker: WorkerId) -> int:
        """What its cache is believed to hold."""
        memory = self._workers.get(worker)
        return 0 if memory is None else int(memory.capacity)

    def served(self, worker: WorkerId, request: Served, at: float) -> EventBatch | None:
        """Take an answered request in; the batch says what changed in the index."""
        memory = self._workers.get(worker)
        if memory is None:
            return None
        keys: list[int] = list(request.keys[memory.stride - 1 :: memory.stride])
        self._judge(memory, keys, request)
        known = memory.touched
        new = [key for key in keys if key not in known]
        cached = request.cached_tokens
        if cached is None:
            cached = (len(keys) - len(new)) * memory.stride * GRANULE
        memory.inserted += max(0, request.prompt_tokens - cached) + request.output_tokens
        for key in reversed(keys):
            known[key] = memory.inserted
            known.move_to_end(key)
        gone = self._expire(memory)
        events: list[CacheEvent] = []
        if new:
            events.append(stored(new, None))
        if gone:
            events.append(removed(gone))
        if not events:
            return None
        memory.seq += 1
        return EventBatch(
            worker, memory.epoch, SOURCE, memory.seq, at, memory.stride, tuple(events)
        )

    @staticmethod
    def _judge(memory: _Memory, keys: Sequence[int], request: Served) -> None:
        """Correct the capacity by what the worker said about this request."""
        if request.cached_tokens is None:
            memory.unreported += request.expected_tokens > 0
            return
        memory.reported = memory.reported or request.cached_tokens > 0
        unit = memory.stride * GRANULE
        short = request.expected_tokens - request.cached_tokens
        at = request.cached_tokens // unit if short >= unit else len(keys) - 1
        touched = memory.touched.get(keys[at]) if 0 <= at < len(keys) else None
        if touched is None:
            return
        distance = float(memory.inserted - touched)
        if short >= unit:
            target = max(float(_MIN_CAPACITY_TOKENS), min(memory.capacity, distance))
            memory.capacity += _SHRINK * (target - memory.capacity)
        elif (
            request.cached_tokens >= request.expected_tokens > 0
            and distance > 0.8 * memory.capacity
        ):
            memory.capacity *= _GROW

    @staticmethod
    def _expire(memory: _Memory) -> list[int]:
        """Take out the keys beyond the capacity, by distance and by number."""
        gone: list[int] = []
        limit = memory.inserted - memory.capacity
        most = memory.capacity / (memory.stride * GRANULE)
        while memory.touched:
            key, touched = next(iter(memory.touched.items()))
            if touched >= limit and len(memory.touched) <= most:
                break
            del memory.touched[key]
            gone.append(key)
        return gone
