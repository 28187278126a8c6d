"""Several data-parallel ranks behind one address, each with a cache of its own."""

from __future__ import annotations

from shared.events import BlocksRemoved, BlocksStored, CacheEvent, removed, stored
from shared.types import Tier


class RankMerge:
    """What *every* rank of a worker holds: a request cannot be steered to one of them.

    A key is told once all ranks have it, and taken back when the first loses it.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._held: dict[tuple[Tier, int], int] = {}

    def merge(self, rank: int, events: list[CacheEvent]) -> list[CacheEvent]:
        """One rank's events -> those of the whole worker."""
        bit, every = 1 << rank, (1 << self._ranks) - 1
        out: list[CacheEvent] = []
        for event in events:
            if isinstance(event, BlocksStored):
                keys = [key for key in event.keys if self._set(event.tier, key, bit) == every]
                if keys:
                    out.append(stored(keys, None, event.tier))
            elif isinstance(event, BlocksRemoved):
                out += self._lose(event.tier, list(event.keys), bit)
            else:
                for tier in Tier:
                    keys = [
                        key for (t, key), held in self._held.items() if t is tier and held & bit
                    ]
                    out += self._lose(tier, keys, bit)
        return out

    def _set(self, tier: Tier, key: int, bit: int) -> int:
        held = self._held[tier, key] = self._held.get((tier, key), 0) | bit
        return held

    def _lose(self, tier: Tier, keys: list[int], bit: int) -> list[CacheEvent]:
        every = (1 << self._ranks) - 1
        gone = []
        for key in keys:
            held = self._held.get((tier, key), 0)
            if held == every:
                gone.append(key)
            if held & ~bit:
                self._held[tier, key] = held & ~bit
            else:
                self._held.pop((tier, key), None)
        return [removed(gone, tier)] if gone else []
