"""How fast each worker prefills, learned from the times to first token it shows.

A sample is (TTFT - fixed part) / (work in tokens) of one answered request that hardly waited.
A worker's figure is the median of its last samples, shrunk to its prior as if that were
``PRIOR_SAMPLES`` samples: what the worker reports itself, else the pool of the same model, else the
configured value. Differences of less than 10 % from the pool are noise and count as none, so that
equal workers have equal costs and share the load.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from math import copysign, exp, log
from statistics import median

import msgspec

from gateway.routing.cost import CostModel
from shared.types import WorkerId

PRIOR_SAMPLES = 8
_KEPT = 64
_SMALL = 256
"""Prompts with less uncached work than this mostly tell the fixed part."""
_MAX_AGE_S = 900.0
_MAX_WAIT_SHARE = 0.2
_NOISE = log(1.1)
_DEFAULT_OVERHEAD_S = 0.005
_OVERHEAD_RANGE_S = (0.0, 2.0)
_RATE_RANGE = (1e-8, 1.0)
_ENOUGH_POINTS = 6
_REFRESH = 8
"""Figures are made anew when samples have come that are one in so many of those kept."""
_LEVER = 32
"""Two small samples tell a slope only if their work differs by this many tokens."""


class PrefillSample(msgspec.Struct, frozen=True):
    """One answered request."""

    uncached: int
    total: int
    ttft_s: float
    """From the start of the attempt."""
    wait_s: float
    """Predicted wait behind others at that moment, and for what is loaded from host memory."""


@dataclass(slots=True)
class _WorkerRate:
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """(when, log seconds per token)."""
    reported: float = 0.0
    own: float | None = None
    """Median of the samples, log, when the figures were made."""


@dataclass(slots=True)
class _Pool:
    workers: dict[WorkerId, _WorkerRate] = field(default_factory=dict)
    small: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """(work in tokens, TTFT) of small requests of all workers."""
    centre: float | None = None
    """Median over the workers, log; None = nothing known."""
    slope: float | None = None
    """From small requests, where there are no others."""
    overhead_s: float = _DEFAULT_OVERHEAD_S
    unread: int = 0
    """Samples that came since the figures were made."""
    figures: dict[WorkerId, float] = field(default_factory=dict)
    """Results of ``s_per_token`` since the last change."""


class RateBook:
    """Prefill rates of all workers, grouped in pools (canonical model names)."""

    def __init__(self, default_s_per_token: float, model: CostModel) -> None:
        self._default = default_s_per_token
        self._model = model
        self._pools: dict[str, _Pool] = {}

    def report(self, pool: str, worker: WorkerId, tokens_per_s: float) -> None:
        """The worker's own measurement; 0 or less says nothing."""
        rate = self._pools.setdefault(pool, _Pool()).workers.setdefault(worker, _WorkerRate())
        known = 1.0 / tokens_per_s if tokens_per_s > 0 else 0.0
        if known != rate.reported:
            rate.reported = known
            self._recentre(self._pools[pool])

    def observe(self, pool: str, worker: WorkerId, sample: PrefillSample, now: float) -> None:
        """Learn from an answered request; one that waited long for others tells nothing."""
        if sample.ttft_s <= 0 or sample.wait_s > _MAX_WAIT_SHARE * sample.ttft_s:
            return
        group = self._pools.get(pool)
        if group is None:
            group = self._pools[pool] = _Pool()
        rate = group.workers.get(worker)
        if rate is None:
            rate = group.workers[worker] = _WorkerRate()
        work = self._model.prefill_s(max(1, sample.uncached), sample.total, 1.0)
        if work < _SMALL:
            group.small.append((work, sample.ttft_s - sample.wait_s))
        else:
            took = sample.ttft_s - sample.wait_s
            # The fixed part can be over-estimated; half of the time is prefill at the least.
            spent = max(took - group.overhead_s, took / 2)
            low, high = _RATE_RANGE
            rate.samples.append((now, log(min(high, max(low, spent / work)))))
            while rate.samples[0][0] < now - _MAX_AGE_S:
                rate.samples.popleft()
        group.unread += 1
        if _REFRESH * group.unread > max(len(rate.samples), len(group.small)):
            self._recentre(group)

    def forget(self, pool: str, worker: WorkerId) -> None:
        """A worker is gone."""
        group = self._pools.get(pool)
        if group is not None and group.workers.pop(worker, None) is not None:
            self._recentre(group)

    def s_per_token(self, pool: str, worker: WorkerId) -> float:
        """Seconds per uncached token, > 0."""
        group = self._pools.get(pool)
        if group is None:
            return self._default
        figure = group.figures.get(worker)
        if figure is None:
            figure = group.figures[worker] = self._figure(group, worker)
        return figure

    def _figure(self, group: _Pool, worker: WorkerId) -> float:
        if group.centre is None:
            return group.slope or self._default
        rate = group.workers.get(worker)
        if rate is None or (rate.own is None and not rate.reported):
            return exp(group.centre)
        prior = log(rate.reported) if rate.reported else group.centre
        count = len(rate.samples)
        own = prior if rate.own is None else rate.own
        shrunk = (count * own + PRIOR_SAMPLES * prior) / (count + PRIOR_SAMPLES)
        apart = shrunk - group.centre
        return exp(group.centre + copysign(max(0.0, abs(apart) - _NOISE), apart))

    def overhead_s(self, pool: str) -> float:
        """Fixed seconds per request before its first token."""
        group = self._pools.get(pool)
        return _DEFAULT_OVERHEAD_S if group is None else group.overhead_s

    def _recentre(self, group: _Pool) -> None:
        group.unread = 0
        for rate in group.workers.values():
            rate.own = median(value for _, value in rate.samples) if rate.samples else None
        known = [
            rate.own if rate.own is not None else log(rate.reported)
            for rate in group.workers.values()
            if rate.own is not None or rate.reported
        ]
        group.centre = median(known) if known else None
        group.figures.clear()
        if len(group.small) < _ENOUGH_POINTS:
            return
        if group.centre is None:
            group.slope = self._slope(group)
            group.figures.clear()
        per_token = exp(group.centre) if group.centre is not None else group.slope or self._default
        low, high = _OVERHEAD_RANGE_S
        fixed = median(took - per_token * work for work, took in group.small)
        group.overhead_s = min(high, max(low, fixed))

    def _slope(self, group: _Pool) -> float | None:
        """Theil-Sen over the newest small samples; None if their sizes are too much alike."""
        points = list(group.small)[-24:]
        works = [work for work, _ in points]
        if max(works) - min(works) < _LEVER:
            return group.slope
        slopes = [
            (there[1] - here[1]) / (there[0] - here[0])
            for here, there in combinations(points, 2)
            if abs(there[0] - here[0]) >= _LEVER
        ]
        if len(slopes) < _ENOUGH_POINTS:
            return group.slope
        return min(30 * self._default, max(self._default / 30, median(slopes)))
