"""What a block pool tells about its announced blocks: a journal that adds up to a set of keys."""

from __future__ import annotations

from collections import Counter

from shared.events import CacheCleared, CacheEvent, removed, stored
from shared.types import BlockKey, Tier


class CacheJournal:
    """Collects stores and removals until they are drained, and knows the set they add up to.

    Two blocks may carry the same 64-bit key by accident or by malice, so keys are counted: one is
    announced as removed when the last block that carries it is gone.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockKey, int] = {}
        self._events: list[CacheEvent] = []
        # Open run of the newest event: keys stored one below the other, or removed.
        self._stored: list[int] = []
        self._parent: BlockKey | None = None
        self._removed: list[int] = []

    def stored(self, key: BlockKey, parent: BlockKey | None) -> None:
        """A block with ``key`` below ``parent`` became reusable."""
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] > 1:
            return
        if not self._stored or self._stored[-1] != parent:
            self._close_run()
            self._parent = parent
        self._stored.append(key)

    def removed(self, key: BlockKey) -> None:
        """A block with ``key`` was evicted."""
        holders = self._holders[key] - 1
        if holders:
            self._holders[key] = holders
            return
        del self._holders[key]
        if self._stored:
            self._close_run()
        self._removed.append(key)

    def cleared(self) -> None:
        """All are gone; what was pending does not matter any more."""
        self._holders.clear()
        self._stored.clear()
        self._removed.clear()
        self._events = [CacheCleared()]

    def keys(self) -> list[int]:
        """The set that all events, pending ones too, add up to."""
        return list(self._holders)

    def drain(self) -> list[CacheEvent]:
        """Events since the last call, in order."""
        self._close_run()
        events, self._events = self._events, []
        return events

    def _close_run(self) -> None:
        if self._stored:
            self._events.append(stored(self._stored, self._parent))
            self._stored = []
        if self._removed:
            self._events.append(removed(self._removed))
            self._removed = []


class NetJournal:
    """The same for a tier whose contents come and go in any order: only the difference is told.

    Its stores name no parent and follow no chain.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._holders: Counter[BlockKey] = Counter()
        self._new: dict[BlockKey, None] = {}
        self._gone: dict[BlockKey, None] = {}

    def stored(self, key: BlockKey) -> None:
        """A block with ``key`` has come."""
        self._holders[key] += 1
        if self._holders[key] > 1:
            return
        if key in self._gone:
            del self._gone[key]
        else:
            self._new[key] = None

    def removed(self, key: BlockKey) -> None:
        """A block with ``key`` has gone."""
        self._holders[key] -= 1
        if self._holders[key]:
            return
        del self._holders[key]
        if key in self._new:
            del self._new[key]
        else:
            self._gone[key] = None

    def cleared(self) -> None:
        """All are gone; somebody else tells so."""
        self._holders.clear()
        self._new.clear()
        self._gone.clear()

    def keys(self) -> list[int]:
        """The set that all events, pending ones too, add up to."""
        return list(self._holders)

    def drain(self) -> list[CacheEvent]:
        """What has changed since the last call."""
        events: list[CacheEvent] = []
        if self._gone:
            events.append(removed(list(self._gone), self._tier))
        if self._new:
            events.append(stored(list(self._new), None, self._tier))
        self._gone, self._new = {}, {}
        return events
