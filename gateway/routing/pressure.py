"""How busy a pool of workers is with prefill: the booked seconds of work per second and worker."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

_MEMORY_S = 30.0


@dataclass(slots=True)
class _Pool:
    work_s: float = 0.0
    """Booked seconds, older ones counting less."""
    at: float = 0.0


class Pressure:
    """Offered prefill work of each pool, averaged over the last 30 s or so."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def book(self, pool: str, seconds: float, now: float) -> None:
        """A request was booked that needs so much prefill."""
        known = self._pools.setdefault(pool, _Pool(at=now))
        known.work_s = known.work_s * _faded(now - known.at) + seconds
        known.at = now

    def share(self, pool: str, workers: int, now: float) -> float:
        """Share of the workers' time that this takes; beyond 1 they cannot keep up. Pure."""
        known = self._pools.get(pool)
        if known is None or not workers:
            return 0.0
        return known.work_s * _faded(now - known.at) / (_MEMORY_S * workers)


def _faded(age_s: float) -> float:
    return exp(-max(0.0, age_s) / _MEMORY_S)
