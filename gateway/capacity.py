"""How much a cache holds, from what it did and did not deliver.

A block that was delivered at some distance (blocks used since its own last use) says that the cache
holds more than that; one that was not, that it holds less. Single answers mislead: a policy that is
not quite LRU, traffic past this gateway, an eviction on purpose. So each is a vote at its distance,
and the capacity is where the votes turn: the distance with the most hits below and misses above.
"""

from __future__ import annotations

from math import floor, log2

_PER_OCTAVE = 4
_OCTAVES = 28
_MOST = 16.0
"""So many votes one distance can have: a cache that has changed is noticed after as many."""
TOLD, ASSUMED = 20.0, 16.0
"""Votes that a told and an assumed capacity stand for, spread over all distances."""


class CapacityEstimate:
    """All in units of one block.

    :param blocks: believed before anything was seen.
    :param weight: how many votes that belief is worth.
    """

    def __init__(self, blocks: float, weight: float) -> None:
        self._votes = [0.0] * (_PER_OCTAVE * _OCTAVES)
        self.blocks = 0.0
        self.believe(blocks, weight)

    def believe(self, blocks: float, weight: float) -> None:
        """A new belief to start from; the votes stay."""
        self._prior, self._weight = max(1.0, blocks), weight
        self._settle()

    def hit(self, distance: int) -> None:
        """A block was delivered at this distance."""
        self._vote(distance, 1.0)

    def miss(self, distance: int) -> None:
        """A block was not delivered at this distance."""
        self._vote(distance, -1.0)

    def _vote(self, distance: int, value: float) -> None:
        at = _bucket(distance)
        before = self._votes[at]
        self._votes[at] = max(-_MOST, min(_MOST, before + value))
        if self._votes[at] != before:
            self._settle()

    def _settle(self) -> None:
        """The best of all limits; of equal ones the largest: it costs one miss to correct it."""
        share = self._weight / len(self._votes)
        turn = _bucket(self._prior)
        best, best_at, total = 0.0, 0, 0.0
        for at, vote in enumerate(self._votes):
            total += vote + (share if at < turn else -share)
            if total >= best:
                best, best_at = total, at + 1
        self.blocks = self._prior if best_at == turn else 2 ** (best_at / _PER_OCTAVE)


def _bucket(distance: float) -> int:
    place = floor(_PER_OCTAVE * log2(max(1.0, distance)))
    return min(place, _PER_OCTAVE * _OCTAVES - 1)
