"""What a worker without cache events holds, learned from the requests it served.

A served prompt is in the worker's cache: its keys enter the index under our own source name, in the
order of their use. They leave it when so many others were used since that the worker cannot hold
them any more (:mod:`gateway.recency`, :mod:`gateway.capacity`). ``cached_tokens`` corrects this:

    delivered as expected   the cache holds at least this much
    less than expected      what was used before the first missing block is gone as well (caches
                            evict in this order), and the cache holds less than that distance
    nothing at all, often   it has lost everything: it was restarted or flushed; or, if that goes
                            on, the cache is too small for all that is asked

Workers also count in steps of their own (OpenAI: 128 tokens from 1024 on), and what they deliver
below such a step says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

import msgspec

from gateway.capacity import ASSUMED, TOLD, CapacityEstimate
from gateway.recency import Recency
from shared.blocks import GRANULE
from shared.events import CacheCleared, CacheEvent, EventBatch, removed, stored
from shared.types import BlockKey, Epoch, WorkerId

SOURCE = "gateway"
"""Name under which learned contents are numbered in the index."""
DEFAULT_CAPACITY_TOKENS = 200_000
EMPTY_AFTER = 3
"""So many answers in a row that reused nothing of what was expected: all is lost."""
_MIN_BLOCKS = 64
_PAST_SHARE = 0.25
"""Blocks beyond the capacity that are still watched, as a share of it: what comes of them votes."""
_STEP_AFTER = 8
"""Deliveries until a common step of them is believed."""


class Served(msgspec.Struct, frozen=True):
    """One answered request. Tokens are those of the keys: 16 each, also where a key is text."""

    keys: Sequence[BlockKey]
    """One per full granule of the prompt."""
    prompt_tokens: int
    output_tokens: int
    expected_tokens: int
    """Usable match that had been predicted from what was learned, promises aside."""
    cached_tokens: int | None
    """None: not known."""
    clock: int | None = None
    """:meth:`Learner.clock` when it was sent; None: it tells nothing about what was there."""
    slack_tokens: int = 0
    """A smaller difference is none: the unit of the keys is not the worker's."""


@dataclass(slots=True)
class _Steps:
    """In what steps a worker counts."""

    step: int = 0
    least: int = 0
    seen: int = 0

    def see(self, cached: int) -> None:
        """A delivery above 0."""
        self.step = gcd(self.step, cached)
        self.least = min(self.least or cached, cached)
        self.seen += 1

    def blur(self, expected: int) -> int:
        """By how much a delivery may fall short of the truth."""
        if self.seen < _STEP_AFTER:
            return 0
        return expected + 1 if expected < self.least else self.step


@dataclass(slots=True)
class _Memory:
    epoch: Epoch
    stride: int
    capacity: CapacityEstimate
    told_blocks: float
    """As the worker said; 0 = it did not."""
    held: Recency = field(default_factory=Recency)
    """What the index says it holds."""
    past: Recency = field(default_factory=Recency)
    """What went beyond the capacity: believed to be gone, and watched."""
    steps: _Steps = field(default_factory=_Steps)
    missed: list[int] = field(default_factory=list)
    """Distances of the misses since something was delivered last, or all was given up."""
    doubted: list[int] = field(default_factory=list)
    """Those for which all was given up, while nothing has been delivered since."""
    seq: int = 0

    @property
    def unit(self) -> int:
        """Tokens per key."""
        return self.stride * GRANULE

    @property
    def blocks(self) -> int:
        """Believed capacity."""
        most = self.capacity.blocks
        if self.told_blocks:
            most = min(most, self.told_blocks)
        return max(_MIN_BLOCKS, int(most))

    def distance(self, key: int) -> int | None:
        """Blocks used since its last use; None: not known any more."""
        near = self.held.distance(key)
        if near is not None:
            return near
        far = self.past.distance(key)
        return None if far is None else len(self.held) + far


class Learner:
    """Turns answered requests into event batches for the index."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Memory] = {}

    def join(self, worker: WorkerId, epoch: Epoch, stride: int, capacity_tokens: int) -> None:
        """A worker starts empty. ``capacity_tokens``: of its KV cache; 0 = unknown."""
        unit = stride * GRANULE
        told = capacity_tokens / unit
        believed = told or DEFAULT_CAPACITY_TOKENS / unit
        estimate = CapacityEstimate(believed, TOLD if told else ASSUMED)
        self._workers[worker] = _Memory(epoch, stride, estimate, told)

    def knows(self, worker: WorkerId) -> bool:
        """It has joined and was not forgotten."""
        return worker in self._workers

    def cleared(self, worker: WorkerId) -> EventBatch | None:
        """Somebody saw that it restarted: it holds nothing of what was learned."""
        memory = self._workers.get(worker)
        if memory is None or not len(memory.held):
            return None
        self.reset(worker)
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
            memory.held, memory.past = Recency(memory.held.clock), Recency()
            memory.missed.clear()
            memory.doubted.clear()

    def resize(self, worker: WorkerId, capacity_tokens: int) -> None:
        """The worker told its capacity: an upper bound for what is believed."""
        memory = self._workers.get(worker)
        if memory is None or capacity_tokens <= 0:
            return
        told = capacity_tokens / memory.unit
        if told != memory.told_blocks:
            memory.told_blocks = told
            memory.capacity.believe(told, TOLD)

    def capacity_tokens(self, worker: WorkerId) -> int:
        """What its cache is believed to hold. Pure."""
        memory = self._workers.get(worker)
        return 0 if memory is None else memory.blocks * memory.unit

    def clock(self, worker: WorkerId) -> int | None:
        """Grows with each request it served. Pure."""
        memory = self._workers.get(worker)
        return None if memory is None else memory.held.clock

    def served(self, worker: WorkerId, request: Served, at: float) -> EventBatch | None:
        """Take an answered request in; the batch says what changed in the index."""
        memory = self._workers.get(worker)
        if memory is None:
            return None
        keys: list[int] = list(request.keys[memory.stride - 1 :: memory.stride])
        events = self._judge(memory, keys, request)
        known = memory.past
        known.drop(keys)
        new = memory.held.touch(keys, request.output_tokens // memory.unit)
        gone = memory.held.keep(memory.blocks)
        if gone:
            known.touch(gone[::-1])
            known.keep(int(_PAST_SHARE * memory.blocks))
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

    def _judge(self, memory: _Memory, keys: list[int], request: Served) -> list[CacheEvent]:
        """Learn from what was delivered; returns what it says about other prompts' blocks."""
        cached, clock = request.cached_tokens, request.clock
        if cached is None or clock is None:
            return []
        blur = max(memory.unit, request.slack_tokens, memory.steps.blur(request.expected_tokens))
        if cached:
            memory.steps.see(cached)
            self._believe(memory, keys[: cached // memory.unit], clock)
        at = cached // memory.unit
        if at >= len(keys) or len(keys) * memory.unit - cached < blur:
            return []
        used = memory.held.used(keys[at])
        if request.expected_tokens - cached >= blur and used is not None and used <= clock:
            return self._missed(memory, keys[at], empty=not cached)
        far = memory.past.distance(keys[at])
        if used is None and far is not None and cached:
            memory.capacity.miss(len(memory.held) + far)
        # Otherwise it was never known, or was used again meanwhile: that tells nothing.
        return []

    @staticmethod
    def _believe(memory: _Memory, delivered: list[int], clock: int) -> None:
        """Something was delivered: what was missed before it was no flush."""
        for distance in memory.missed:
            memory.capacity.miss(distance)
        memory.missed.clear()
        memory.doubted.clear()
        for key in reversed(delivered):
            used = memory.held.used(key)
            if used is not None and used > clock:
                continue  # a sibling's, who came in between
            known = memory.distance(key)
            if known is not None:
                memory.capacity.hit(known)
            elif len(memory.held) >= memory.blocks:
                # Forgotten, or somebody else's: at least as far away as all that is watched.
                memory.capacity.hit(len(memory.held) + len(memory.past))
            return

    @staticmethod
    def _missed(memory: _Memory, missing: int, *, empty: bool) -> list[CacheEvent]:
        distance = memory.held.distance(missing)
        assert distance is not None
        if empty:
            memory.missed.append(distance)
            if len(memory.missed) >= EMPTY_AFTER:
                # Twice in a row it was no restart: then the cache is too small for this.
                for far in memory.doubted:
                    memory.capacity.miss(far)
                memory.doubted, memory.missed = memory.missed, []
                memory.held.clear()
                memory.past.clear()
                return [CacheCleared()]
        else:
            memory.capacity.miss(distance)
        gone = memory.held.drop_before(missing)
        return [removed(gone)] if gone else []
