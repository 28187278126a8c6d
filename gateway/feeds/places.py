"""Which workers are said to publish their events where: two at one place are a mistake."""

from __future__ import annotations

from gateway.engines.base import FeedPlan
from shared.types import WorkerId


class Places:
    """Event addresses of all engines that are followed."""

    def __init__(self) -> None:
        self._by_worker: dict[WorkerId, tuple[str, ...]] = {}
        self._by_place: dict[str, set[WorkerId]] = {}

    def put(self, worker: WorkerId, plan: FeedPlan) -> None:
        """A worker publishes as ``plan`` says, and nowhere else."""
        if self._by_worker.get(worker) == plan.endpoints:
            return
        self.drop(worker)
        self._by_worker[worker] = plan.endpoints
        for place in plan.endpoints:
            self._by_place.setdefault(place, set()).add(worker)

    def drop(self, worker: WorkerId) -> None:
        """A worker is followed no longer. Unknown ones are fine."""
        for place in self._by_worker.pop(worker, ()):
            others = self._by_place[place]
            others.discard(worker)
            if not others:
                del self._by_place[place]

    def shared(self, worker: WorkerId) -> str:
        """What is wrong with a worker's addresses; empty: nothing. Pure."""
        for place in self._by_worker.get(worker, ()):
            others = sorted(self._by_place[place] - {worker})
            if others:
                named = "its events" if len(others) == 1 else f"events of {len(others)} others"
                return f"{others[0]} has {named} at {place}, too: each engine needs its own port"
        return ""
