"""How long a request waits for a place where a worker serves only so many at a time.

An engine with four slots queues the fifth request, and answers that are not streamed show nothing
but their end. How many are served at once is seen, not told: answers that have begun side by side,
or one that ends before others which came earlier. That more than were seen find a place is likely
as long as a worker has about as many requests as the others, so nothing is said against the first
1.25 times as many as the one with the fewest has, and two more. (Consistent hashing with bounded
loads compares with the mean; where three of four have all, the mean tells them that all is well.)
The Nth request beyond both then waits

    S * (N - max(seen, 1.25 * fewest + 2)) / seen

N counts those that have shown no token yet: the others have a place. S is how long one request
takes. By Little's law N requests at a worker with c places take N/c times as long as one, so a
sample is the time of an attempt, times seen / N where it began as the Nth of more. Nothing is said
of a worker because of what another one has too much of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.routing.base import WorkerView

FEWEST = 4
"""Assumed of every worker from the start."""
_UNEVEN = 1.25
"""Times the fewest that a worker may have."""
_FEW = 2.0
"""And so many more."""
_WEIGHT = 0.05
"""Of the newest sample, once there are many."""


def place_waits(workers: Sequence[WorkerView]) -> list[float]:
    """Of each worker, the seconds until it has a place for one more. Pure."""
    requests = [worker.inflight + worker.foreign - worker.decoding for worker in workers]
    most = max(requests, default=0)
    if most < FEWEST or most + 1 <= (ample := _UNEVEN * min(requests) + _FEW):
        return [0.0] * len(requests)
    waits = []
    for worker, count in zip(workers, requests, strict=True):
        places = worker.at_once
        beyond = count + 1 - (max(ample, places))
        waits.append(worker.service_s * beyond / places if beyond > 0.0 else 0.0)
    return waits


@dataclass(slots=True)
class _Pool:
    at_once: int = FEWEST
    samples: int = 0
    mean_s: float = 0.0


@dataclass(slots=True)
class ServiceTimes:
    """Seconds that one request takes, and how many a worker serves at once, of each pool (canonical
    model name): a figure of each worker would send the most to the one that was sent the most."""

    _pools: dict[str, _Pool] = field(default_factory=dict)

    def observe(self, pool: str, seconds: float, together: int = 1) -> None:
        """One request took so long, and so many were there when it began, itself among them."""
        known = self._pools.get(pool)
        if known is None:
            known = self._pools[pool] = _Pool()
        known.samples += 1
        weight = 1 / known.samples
        if together > known.at_once:
            seconds *= known.at_once / together
        known.mean_s += (weight if weight > _WEIGHT else _WEIGHT) * (seconds - known.mean_s)

    def served_at_once(self, pool: str, requests: int) -> None:
        """A worker was seen to serve so many side by side."""
        if requests <= FEWEST:  # as every worker is assumed to do
            return
        known = self._of(pool)
        known.at_once = max(known.at_once, requests)

    def _of(self, pool: str) -> _Pool:
        known = self._pools.get(pool)
        if known is None:
            known = self._pools[pool] = _Pool()
        return known

    def figures(self, pool: str) -> tuple[int, float]:
        """:meth:`at_once` and :meth:`seconds`. Pure."""
        known = self._pools.get(pool)
        return (FEWEST, 0.0) if known is None else (known.at_once, known.mean_s)

    def at_once(self, pool: str) -> int:
        """The most that a worker of the pool was seen to serve. Pure."""
        known = self._pools.get(pool)
        return FEWEST if known is None else known.at_once

    def seconds(self, pool: str) -> float:
        """What one request takes; 0 = nothing is known. Pure."""
        known = self._pools.get(pool)
        return 0.0 if known is None else known.mean_s
