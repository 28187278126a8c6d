"""Everybody in turn."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gateway.routing.base import Candidate, Query, Scored
from shared.types import WorkerId


class RoundRobin:
    """Whoever was chosen longest ago. State: the turn at which each worker was chosen last."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[WorkerId, int] = {}

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """By turn; fair also when workers come, go or serve different models."""
        ids = {candidate.worker.id for candidate in candidates}
        if len(self._last) > 4 * len(ids) + 64:
            self._last = {worker: at for worker, at in self._last.items() if worker in ids}
        scored = [Scored(item, float(self._last.get(item.worker.id, 0))) for item in candidates]
        scored.sort(key=lambda item: (item.cost, item.candidate.worker.id))
        self._turn += 1
        if scored:
            self._last[scored[0].candidate.worker.id] = self._turn
        return scored
