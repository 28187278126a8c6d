"""How busy workers and their pools are with prefill: what was booked in the last minute or less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

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
        faded = exp(-max(0.0, now - self.at) / self.memory_s)
        self.bound = self.bound * faded + bound
        self.bound_work_s = self.bound_work_s * faded + bound * work_s
        self.work_s = self.work_s * faded + work_s
        self.square_s = self.square_s * faded + work_s * work_s
        self.at = now

    def weight(self, now: float) -> float:
        """What makes a sum a mean per second."""
        return exp(-max(0.0, now - self.at) / self.memory_s) / self.memory_s


NOTHING = Offered()


class Pressure:
    """Offered prefill work, of each pool and each worker."""

    def __init__(self) -> None:
        self._pools: dict[str, _Flow] = {}
        self._workers: dict[WorkerId, _Flow] = {}

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
        known = self._pools.get(pool)
        if known is None or not workers:
            return 0.0
        return known.work_s * known.weight(now) / workers

    def offered(self, worker: WorkerId, now: float) -> Offered:
        """Of one worker. Pure."""
        known = self._workers.get(worker)
        if known is None:
            return NOTHING
        weight = exp(-max(0.0, now - known.at) / _WORKER_MEMORY_S) / _WORKER_MEMORY_S
        busy, bound_busy = known.work_s * weight, known.bound_work_s * weight
        busy = min(busy, _BUSIEST)
        bound_busy = min(bound_busy, _BUSIEST)
        mean_wait_s = known.square_s * weight / (2.0 * (1.0 - busy))
        return Offered(known.bound * weight, bound_busy, mean_wait_s)

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
