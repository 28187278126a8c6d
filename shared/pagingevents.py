"""What a block pool tells about its announced blocks: a journal that adds up to a set of keys."""

from __future__ import annotations

from shared.events import CacheCleared, CacheEvent, removed, stored
from shared.types import BlockKey


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
