"""How busy workers and their pools are with prefill: what was booked in the last minute or less,
by this gateway and, as they tell, by the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf

import msgspec

from shared.types import WorkerId

_POOL_MEMORY_S = 30.0
_WORKER_MEMORY_S = 60.0
_FREE = 0.5
"""Weight of a request that nothing binds to its worker, among those who wait behind others: it can
avoid a queue, if there is a shorter one. Without it long prefills look harmless only where nobody
comes, and all of them go to one worker."""
_BUSIEST = 0.9
"""Largest share of a worker's time that is believed: a queue's length has no bound near 1."""


class Offered(msgspec.Struct, frozen=True):
    """What one worker was sent of late."""

    bound_per_s: float = 0.0
    """Requests a second that will wait there; one that could as well go elsewhere counts half."""
    bound_busy: float = 0.0
    """Share of its time that their prefill takes, at most 0.9."""
    mean_wait_s: float = 0.0
    """How long a request that comes at any time waits there (Pollaczek and Khinchine)."""


class Flow(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway books on a worker, per second."""

    bound: float = 0.0
    bound_work_s: float = 0.0
    work_s: float = 0.0
    square_s: float = 0.0

    def __add__(self, other: Flow) -> Flow:
        return Flow(
            self.bound + other.bound,
            self.bound_work_s + other.bound_work_s,
            self.work_s + other.work_s,
            self.square_s + other.square_s,
        )

    def sound(self) -> Flow:
        """Without figures that cannot be."""
        return Flow(
            _sound(self.bound),
            _sound(self.bound_work_s),
            _sound(self.work_s),
            _sound(self.square_s),
        )


class Flows(msgspec.Struct, frozen=True):
    """What one gateway books."""

    workers: dict[str, Flow] = {}
    pools: dict[str, float] = {}
    """Prefill seconds per second."""


@dataclass(slots=True)
class _Flow:
    """Sums in which older bookings count less."""

    memory_s: float
    at: float
    bound: float = 0.0
    bound_work_s: float = 0.0
    work_s: float = 0.0
    square_s: float = 0.0

    def add(self, work_s: float, bound: float, now: float) -> None:
        passed = now - self.at
        faded = exp(-passed / self.memory_s) if passed > 0.0 else 1.0
        self.bound = self.bound * faded + bound
        self.bound_work_s = self.bound_work_s * faded + bound * work_s
        self.work_s = self.work_s * faded + work_s
        self.square_s = self.square_s * faded + work_s * work_s
        self.at = now

    def weight(self, now: float) -> float:
        """What makes a sum a mean per second."""
        passed = now - self.at
        return (exp(-passed / self.memory_s) if passed > 0.0 else 1.0) / self.memory_s

    def per_second(self, now: float) -> Flow:
        """All sums as means."""
        weight = self.weight(now)
        return Flow(
            self.bound * weight,
            self.bound_work_s * weight,
            self.work_s * weight,
            self.square_s * weight,
        )


def _sound(rate: float) -> float:
    return rate if 0.0 <= rate < inf else 0.0


NOTHING = Offered()
_LITTLE = 1e-6
"""Prefill seconds per second that nobody needs to be told of."""


class Pressure:
    """Offered prefill work, of each pool and each worker."""

    def __init__(self) -> None:
        self._pools: dict[str, _Flow] = {}
        self._workers: dict[WorkerId, _Flow] = {}
        self._told: dict[str, Flows] = {}
        """By gateway ..."""
        self._others: dict[str, Flow] = {}
        """... and in all: by worker,"""
        self._others_work: dict[str, float] = {}
        """by pool."""
        self._summed = True
        """What the others tell is added up when it is needed."""

    def book(
        self, pool: str, worker: WorkerId, seconds: float, now: float, *, bound: float = 1.0
    ) -> None:
        """A request was booked that needs so much prefill.

        :param bound: share of its prompt that it finds there and nowhere else, 0..1.
        """
        group, flow = self._pools.get(pool), self._workers.get(worker)
        if group is None:
            group = self._pools[pool] = _Flow(_POOL_MEMORY_S, now)
        if flow is None:
            flow = self._workers[worker] = _Flow(_WORKER_MEMORY_S, now)
        group.add(seconds, 1.0, now)
        flow.add(seconds, _FREE + (1.0 - _FREE) * bound, now)

    def share(self, pool: str, workers: int, now: float) -> float:
        """Share of the workers' time that this takes; beyond 1 they cannot keep up. Pure."""
        if not workers:
            return 0.0
        if not self._summed:
            self._sum()
        known = self._pools.get(pool)
        own = 0.0 if known is None else known.work_s * known.weight(now)
        if self._others_work:
            own += self._others_work.get(pool, 0.0)
        return own / workers

    def offered(self, worker: WorkerId, now: float) -> Offered:
        """Of one worker. Pure."""
        if not self._summed:
            self._sum()
        known = self._workers.get(worker)
        others = self._others.get(worker) if self._others else None
        if known is None and others is None:
            return NOTHING
        bound = bound_busy = busy = square_s = 0.0
        if known is not None:
            passed = now - known.at
            weight = exp(-passed / _WORKER_MEMORY_S) if passed > 0.0 else 1.0
            weight /= _WORKER_MEMORY_S
            bound, square_s = known.bound * weight, known.square_s * weight
            busy, bound_busy = known.work_s * weight, known.bound_work_s * weight
        if others is not None:
            bound, square_s = bound + others.bound, square_s + others.square_s
            busy, bound_busy = busy + others.work_s, bound_busy + others.bound_work_s
        busy = _BUSIEST if busy > _BUSIEST else busy
        bound_busy = _BUSIEST if bound_busy > _BUSIEST else bound_busy
        return Offered(bound, bound_busy, square_s / (2.0 * (1.0 - busy)))

    def flows(self, now: float) -> Flows:
        """What this gateway books, for the others. Pure."""
        workers = {str(name): flow.per_second(now) for name, flow in self._workers.items()}
        pools = {name: flow.work_s * flow.weight(now) for name, flow in self._pools.items()}
        return Flows(
            {name: flow for name, flow in workers.items() if flow.work_s > _LITTLE},
            {name: work_s for name, work_s in pools.items() if work_s > _LITTLE},
        )

    def hear(self, gateway: str, flows: Flows | None) -> None:
        """What another gateway books; replaces what it told before. None: it is gone."""
        if flows is None:
            self._told.pop(gateway, None)
        else:
            self._told[gateway] = flows
        self._summed = False

    def _sum(self) -> None:
        self._summed, self._others, self._others_work = True, {}, {}
        for told in self._told.values():
            for name, flow in told.workers.items():
                self._others[name] = self._others.get(name, Flow()) + flow.sound()
            for name, work_s in told.pools.items():
                self._others_work[name] = self._others_work.get(name, 0.0) + _sound(work_s)

    def welcome(self, worker: WorkerId, others: Sequence[WorkerId], now: float) -> None:
        """A worker joins: it counts as being sent what the others are, until it shows; or it would
        draw every long prompt at once."""
        flows = [self._workers[other] for other in others if other in self._workers]
        if worker in self._workers or not flows:
            return
        share = _WORKER_MEMORY_S / len(others)
        flow = self._workers[worker] = _Flow(_WORKER_MEMORY_S, now)
        flow.bound = sum(one.bound * one.weight(now) for one in flows) * share
        flow.bound_work_s = sum(one.bound_work_s * one.weight(now) for one in flows) * share
        flow.work_s = sum(one.work_s * one.weight(now) for one in flows) * share
        flow.square_s = sum(one.square_s * one.weight(now) for one in flows) * share

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self._workers.pop(worker, None)
