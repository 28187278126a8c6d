"""Which sequences have run out of time. No clock: the time comes in as an argument."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from operator import itemgetter

from worker.sequence import Sequence


class Deadlines:
    """The deadlines of all sequences that have one, soonest first."""

    def __init__(self) -> None:
        self._order: list[tuple[float, str]] = []

    def add(self, seq: Sequence) -> None:
        """Note its deadline, if it has one."""
        if seq.deadline is not None:
            insort(self._order, (seq.deadline, seq.id))

    def discard(self, seq: Sequence) -> None:
        """It has ended; it must have been added."""
        if seq.deadline is not None:
            del self._order[bisect_left(self._order, (seq.deadline, seq.id))]

    def due(self, now: float) -> list[str]:
        """Ids of those whose deadline is not after ``now`` (monotonic seconds)."""
        if not self._order or self._order[0][0] > now:
            return []
        end = bisect_right(self._order, now, key=itemgetter(0))
        return [seq_id for _, seq_id in self._order[:end]]

    def __len__(self) -> int:
        return len(self._order)
