"""By load alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gateway.routing.base import Candidate, Query, Scored, WorkerView
from gateway.routing.ties import in_order


def load_of(worker: WorkerView) -> float:
    """Requests it is busy with; booked prefill decides among equals (below one request)."""
    return worker.requests + worker.booked_prefill_s / (1.0 + worker.booked_prefill_s)


class LeastLoaded:
    """Fewest requests, then least prefill work booked; knows nothing of prefixes."""

    name = "least_loaded"

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """By :func:`load_of`."""
        return in_order(query, [Scored(item, load_of(item.worker)) for item in candidates])
