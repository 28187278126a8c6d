"""Free blocks as runs of consecutive ids, so that a sequence's blocks lie side by side.

Attention over consecutive blocks reads a view of the pool; over scattered ones it must gather.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise

GAP = 16
"""Blocks left free behind a run's left neighbour that is in use, so that it can grow in place."""


class FreeRuns:
    """Set of free block ids, kept as maximal runs ``[start, end)``. O(log runs) a call."""

    def __init__(self, n_blocks: int) -> None:
        self._n_free = n_blocks
        self._ends = {0: n_blocks}  # start -> end
        self._starts = {n_blocks: 0}  # end -> start
        # (-length, start); entries whose run has changed are skipped when they come up.
        self._largest = [(-n_blocks, 0)]

    def __len__(self) -> int:
        return self._n_free

    def __iter__(self) -> Iterator[int]:
        for start, end in self._ends.items():
            yield from range(start, end)

    def put(self, block: int) -> None:
        """Add a block that is not in the set."""
        start = self._starts.pop(block, block)
        end = self._ends.pop(block + 1, block + 1)
        self._add(start, end)
        self._n_free += 1

    def take(self, n: int, after: int | None, refs: Sequence[int]) -> list[int]:
        """Remove and return ``n <= len(self)`` ids, in order of use.

        :param after: prefer the ids that follow this one.
        :param refs: holders by block id, to see whether a run's left neighbour may still grow.
        """
        taken: list[int] = []
        if after is not None and after + 1 in self._ends:
            taken.extend(self._cut(after + 1, after + 1, n))
        while len(taken) < n:
            taken.extend(self._take_from_largest(n - len(taken), refs))
        self._n_free -= n
        return taken

    def _take_from_largest(self, n: int, refs: Sequence[int]) -> range:
        while True:
            negative, start = self._largest[0]
            if self._ends.get(start) == start - negative:
                break
            heapq.heappop(self._largest)
        spare = -negative - n
        first = start
        if spare > 0 and start > 0 and refs[start - 1] > 0:
            first += min(spare // 2, GAP)
        return self._cut(start, first, n)

    def _cut(self, start: int, first: int, n: int) -> range:
        """Take up to ``n`` ids from ``first`` on out of the run that begins at ``start``."""
        end = self._ends.pop(start)
        del self._starts[end]
        last = min(first + n, end)
        if start < first:
            self._add(start, first)
        if last < end:
            self._add(last, end)
        return range(first, last)

    def _add(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts[end] = start
        heapq.heappush(self._largest, (start - end, start))
        if len(self._largest) > 4 * len(self._ends) + 64:
            self._largest = [(begin - stop, begin) for begin, stop in self._ends.items()]
            heapq.heapify(self._largest)

    def check(self) -> None:
        """Raise AssertionError unless the runs are disjoint, maximal and counted."""
        runs = sorted(self._ends.items())
        if sum(end - start for start, end in runs) != self._n_free:
            raise AssertionError("free blocks are miscounted")
        if {end: start for start, end in runs} != self._starts:
            raise AssertionError("the two maps of runs differ")
        bounds = [bound for run in runs for bound in run]
        if any(left >= right for left, right in pairwise(bounds)):
            raise AssertionError("runs overlap or touch")
