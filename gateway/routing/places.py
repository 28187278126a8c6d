"""How long a request waits for a place where a worker serves only so many at a time.

Learned from answers streamed or not, with usage or without. What a worker serves at once is seen,
not told: answers that have begun side by side, or one that ends before others which came earlier.
How many more it could serve is not known; each doubling is taken to be a quarter as likely as the
one before, P(places > x) = (seen / x)^2, so the Nth request expects to wait

    S * E[(N - places)+ / places] = S * (2N / 3seen - 1 + (seen / N)^2 / 3)

S is how long one request takes. By Little's law N requests at a worker with c places take N/c times
as long as one, so a sample is the time of an attempt, times seen / N where it began as the Nth of
more. If ``seen`` is too small then so is S, and the wait is still in proportion to what others met.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.types import WorkerId

FEWEST = 4
"""Assumed of every worker from the start."""
_PRIOR_SAMPLES = 8
_WEIGHT = 0.05
"""Of the newest sample, once there are many."""


def place_wait_s(service_s: float, seen: int, requests: int) -> float:
    """Expected wait of one more beside ``requests`` others, where ``seen`` were served at once."""
    nth = requests + 1
    if nth <= seen:
        return 0.0
    return service_s * (2 * nth / (3 * seen) - 1 + (seen / nth) ** 2 / 3)


@dataclass(slots=True)
class _Mean:
    samples: int = 0
    value: float = 0.0

    def add(self, sample: float) -> None:
        self.samples += 1
        self.value += max(_WEIGHT, 1 / self.samples) * (sample - self.value)


@dataclass(slots=True)
class _Pool:
    at_once: int = FEWEST
    all: _Mean = field(default_factory=_Mean)
    workers: dict[WorkerId, _Mean] = field(default_factory=dict)


class ServiceTimes:
    """Seconds that one request takes, of each worker and its pool (canonical model name), and how
    many a worker of the pool has served at once: a figure of each of them would send the most to
    the one that was sent the most before."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def observe(self, pool: str, worker: WorkerId, seconds: float) -> None:
        """An attempt that was answered in full."""
        group = self._pools.setdefault(pool, _Pool())
        group.all.add(seconds)
        group.workers.setdefault(worker, _Mean()).add(seconds)

    def served_at_once(self, pool: str, requests: int) -> None:
        """A worker was seen to serve so many side by side."""
        group = self._pools.setdefault(pool, _Pool())
        group.at_once = max(group.at_once, requests)

    def at_once(self, pool: str) -> int:
        """The most that a worker of the pool was seen to serve. Pure."""
        group = self._pools.get(pool)
        return FEWEST if group is None else group.at_once

    def seconds(self, pool: str, worker: WorkerId) -> float:
        """Of a worker, shrunk to its pool; 0 = nothing is known. Pure."""
        group = self._pools.get(pool)
        if group is None:
            return 0.0
        own = group.workers.get(worker)
        if own is None:
            return group.all.value
        total = own.samples * own.value + _PRIOR_SAMPLES * group.all.value
        return total / (own.samples + _PRIOR_SAMPLES)

    def forget(self, pool: str, worker: WorkerId) -> None:
        """A worker is gone; so is its pool with the last one."""
        group = self._pools.get(pool)
        if group is not None:
            group.workers.pop(worker, None)
            if not group.workers:
                del self._pools[pool]
