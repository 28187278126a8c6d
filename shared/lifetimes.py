"""How long cached blocks live, lie idle and wait for their reuse: histograms without a clock.

Time comes in once per step (:meth:`Lifetimes.tick`) as a *stamp* that all blocks touched in the
step share. So an event costs a block one store, and a path of blocks that were touched together is
counted at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby

import msgspec

SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
STEPS = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
USES = (0, 1, 2, 3, 5, 10, 20, 50, 100, 1_000)

Stamp = tuple[int, float]
"""Number of a step and when it began, seconds."""


class Distribution(msgspec.Struct, frozen=True):
    """A histogram as a value."""

    bounds: tuple[float, ...] = ()
    """Upper bounds, inclusive."""
    counts: tuple[int, ...] = ()
    """Per bound, and beyond the last one. Not cumulative."""
    total: float = 0.0
    """Sum of the observations."""

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None if nothing was observed."""
        return self.total / self.count if self.count else None


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


class _Span:
    """A duration in seconds and in steps."""

    def __init__(self) -> None:
        self.seconds = _Histogram(SECONDS)
        self.steps = _Histogram(STEPS)

    def observe(self, since: Stamp, now: Stamp, times: int = 1) -> None:
        self.steps.observe(now[0] - since[0], times)
        self.seconds.observe(now[1] - since[1], times)


class BlockLifetimes(msgspec.Struct, frozen=True):
    """What became of the device's cached blocks so far."""

    age_s: Distribution = Distribution()
    """From the moment a block could be found until it was evicted."""
    age_steps: Distribution = Distribution()
    idle_s: Distribution = Distribution()
    """From its last use until it was evicted."""
    idle_steps: Distribution = Distribution()
    gap_s: Distribution = Distribution()
    """Between two uses."""
    gap_steps: Distribution = Distribution()
    uses: Distribution = Distribution()
    """How often an evicted block was found by somebody."""


class Lifetimes:
    """Observes the device blocks of one pool."""

    def __init__(self, n_blocks: int) -> None:
        self._now: Stamp = (0, 0.0)
        self._born = [self._now] * n_blocks
        self._touched = [self._now] * n_blocks
        self._uses = [0] * n_blocks
        self._age, self._idle, self._gap = _Span(), _Span(), _Span()
        self._reuses = _Histogram(USES)

    def tick(self, seconds: float) -> None:
        """A step begins."""
        self._now = (self._now[0] + 1, seconds)

    def born(self, block: int) -> None:
        """A block can be found from now on."""
        self._born[block] = self._touched[block] = self._now
        self._uses[block] = 0

    def found(self, blocks: Sequence[int]) -> None:
        """A path of blocks has got one more holder."""
        touched, uses, now = self._touched, self._uses, self._now
        for since, run in groupby(map(touched.__getitem__, blocks)):
            self._gap.observe(since, now, sum(1 for _ in run))
        for block in blocks:
            touched[block] = now
            uses[block] += 1

    def idle(self, block: int) -> None:
        """Its last holder has left."""
        self._touched[block] = self._now

    def evicted(self, block: int) -> None:
        """It is gone from the device."""
        self._age.observe(self._born[block], self._now)
        self._idle.observe(self._touched[block], self._now)
        self._reuses.observe(self._uses[block])

    def read(self) -> BlockLifetimes:
        """The histograms so far."""
        return BlockLifetimes(
            age_s=self._age.seconds.read(),
            age_steps=self._age.steps.read(),
            idle_s=self._idle.seconds.read(),
            idle_steps=self._idle.steps.read(),
            gap_s=self._gap.seconds.read(),
            gap_steps=self._gap.steps.read(),
            uses=self._reuses.read(),
        )
