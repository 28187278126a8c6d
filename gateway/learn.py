"""What a worker without cache events holds, learned from the requests it served.

A served prompt is in the worker's cache: its keys enter the index in the order of their use. They
leave it when so many others were used since that the worker cannot hold them any more
(:mod:`gateway.recency`, :mod:`gateway.capacity`). ``cached_tokens`` corrects this:

    delivered as expected   the cache holds at least this much
    less than expected      what was used before the first missing block is gone as well (caches
                            evict in this order), and the cache holds less than that distance
    nothing at all, often   it has lost everything: it was restarted or flushed; or, if that goes
                            on, the cache is too small for all that is asked

Workers also count in steps of their own (OpenAI: 128 tokens from 1024 on), and what they deliver
below such a step says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import gcd

import msgspec

from gateway.capacity import ASSUMED, TOLD, CapacityEstimate
from gateway.index.base import Contents, Learned
from gateway.recency import Recency
from shared.blocks import GRANULE
from shared.types import BlockKey, WorkerId

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
        """By how much a delivery may fall short of the truth, once enough were seen."""
        return expected + 1 if expected < self.least else self.step


@dataclass(slots=True)
class _Memory:
    stride: int
    capacity: CapacityEstimate
    told_blocks: float
    """As the worker said; 0 = it did not."""
    held: Recency = field(default_factory=Recency)
    """What the index says it holds. What went beyond the capacity is believed to be gone, and
    watched."""
    steps: _Steps = field(default_factory=_Steps)
    missed: list[int] = field(default_factory=list)
    """Distances of the misses since something was delivered last, or all was given up."""
    doubted: list[int] = field(default_factory=list)
    """Those for which all was given up, while nothing has been delivered since."""
    unit: int = field(init=False)
    """Tokens per key."""

    def __post_init__(self) -> None:
        self.unit = self.stride * GRANULE

    @property
    def blocks(self) -> int:
        """Believed capacity."""
        most, told = self.capacity.blocks, self.told_blocks
        if told and told < most:
            most = told
        return int(most) if most > _MIN_BLOCKS else _MIN_BLOCKS


class Learner:
    """Turns answered requests into changes of the index."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Memory] = {}

    def join(self, worker: WorkerId, stride: int, capacity_tokens: int) -> None:
        """A worker starts empty. ``capacity_tokens``: of its KV cache; 0 = unknown."""
        unit = stride * GRANULE
        told = capacity_tokens / unit
        believed = told or DEFAULT_CAPACITY_TOKENS / unit
        estimate = CapacityEstimate(believed, TOLD if told else ASSUMED)
        self._workers[worker] = _Memory(stride, estimate, told)

    def contents(self, worker: WorkerId) -> Contents:
        """What a worker that has joined holds; the same object until it joins anew."""
        return self._workers[worker].held

    def knows(self, worker: WorkerId) -> bool:
        """It has joined and was not forgotten."""
        return worker in self._workers

    def cleared(self, worker: WorkerId) -> Learned | None:
        """Somebody saw that it restarted: it holds nothing of what was learned."""
        memory = self._workers.get(worker)
        if memory is None or not len(memory.held):
            return None
        self.reset(worker)
        return Learned(cleared=True)

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self._workers.pop(worker, None)

    def reset(self, worker: WorkerId) -> None:
        """Its own events have replaced what was learned."""
        memory = self._workers.get(worker)
        if memory is not None:
            memory.held.clear()
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

    def served(self, worker: WorkerId, request: Served) -> Learned | None:
        """Take an answered request in; says what changed in the index, None: nothing."""
        memory = self._workers.get(worker)
        if memory is None:
            return None
        stride = memory.stride
        keys: Sequence[int] = request.keys[stride - 1 :: stride] if stride > 1 else request.keys
        lost: Collection[int] | None = ()
        if request.cached_tokens is not None and request.clock is not None:
            lost = self._judge(memory, keys, request, request.cached_tokens, request.clock)
        held, blocks = memory.held, memory.blocks
        unnamed = request.output_tokens // memory.unit
        new = held.touch(keys, unnamed)
        gone: Collection[int] = held.keep(blocks, int(_PAST_SHARE * blocks))
        if new and len(keys) + unnamed > blocks and held.used(keys, len(keys) - 1) is None:
            # A prompt beyond the capacity: its end leaves at once, so it never came.
            both = set(new).intersection(gone)
            new, gone = [k for k in new if k not in both], [k for k in gone if k not in both]
        if lost is not None and not (new or gone or lost):
            return None
        return Learned(cleared=lost is None, lost=lost or (), stored=new, evicted=gone)

    def _judge(
        self, memory: _Memory, keys: Sequence[int], request: Served, cached: int, clock: int
    ) -> Collection[int] | None:
        """Learn from what was delivered; returns which blocks are gone besides, None: all."""
        unit, steps = memory.unit, memory.steps
        at, slack = cached // unit, request.slack_tokens
        blur = slack if slack > unit else unit
        if steps.seen >= _STEP_AFTER:
            blur = max(blur, steps.blur(request.expected_tokens))
        if cached:
            steps.see(cached)
            self._believe(memory, keys[:at], clock)
        if at >= len(keys) or len(keys) * unit - cached < blur:
            return ()
        used = memory.held.used(keys, at)
        if request.expected_tokens - cached >= blur and used is not None and used <= clock:
            return self._missed(memory, keys, at, empty=not cached)
        far = memory.held.distance(keys, at)
        if used is None and far is not None and cached:
            memory.capacity.miss(far)
        # Otherwise it was never known, or was used again meanwhile: that tells nothing.
        return ()

    @staticmethod
    def _believe(memory: _Memory, delivered: Sequence[int], clock: int) -> None:
        """Something was delivered: what was missed before it was no flush."""
        if memory.missed or memory.doubted:
            for distance in memory.missed:
                memory.capacity.miss(distance)
            memory.missed.clear()
            memory.doubted.clear()
        held = memory.held
        at = held.last_but(delivered, clock)
        if at is None:
            return  # all of it was used by siblings, who came in between
        known = held.distance(delivered, at)
        if known is not None:
            memory.capacity.hit(known)
        elif len(held) >= memory.blocks:
            # Forgotten, or somebody else's: at least as far away as all that is watched.
            memory.capacity.hit(len(held) + held.watched)

    @staticmethod
    def _missed(
        memory: _Memory, keys: Sequence[int], at: int, *, empty: bool
    ) -> Collection[int] | None:
        distance = memory.held.distance(keys, at)
        assert distance is not None
        if empty:
            memory.missed.append(distance)
            if len(memory.missed) >= EMPTY_AFTER:
                # Twice in a row it was no restart: then the cache is too small for this.
                for far in memory.doubted:
                    memory.capacity.miss(far)
                memory.doubted, memory.missed = memory.missed, []
                memory.held.clear()
                return None
        else:
            memory.capacity.miss(distance)
        return memory.held.drop_before(keys, at)
