"""The cells of the storage for large fleets: how they change, and how they make room.

    cells[key] -> set id -> masks[set id]     (:mod:`gateway.index.holdersets`)

The table is *rebuilt* in small steps when it fills up, when many of its cells are deleted or belong
to abandoned slots, or when it has become mostly empty. Meanwhile there are two: new keys go into
``_cells``, and what is still in ``_old`` is found and changed there.

Arrays are quick for thousands of keys and slow for the twenty of a usual batch of events, so
changes are put off (:mod:`gateway.index.waiting`) until there are many, or somebody asks for what
needs them done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gateway.index.cells import DELETED, WIDTH, ZERO_STANDS_FOR, Cells, Keys, Places
from gateway.index.holdersets import HolderSets
from gateway.index.holdings import Holdings
from gateway.index.slots import Slot
from gateway.index.waiting import Change, Waiting

_FULL = 0.7
_ROOM = 1.5
"""A new table has this many times the cells that its keys need at ``_FULL``."""
_SMALLEST = 1024
_PUT_OFF = 1024
"""Keys whose changes are put off at most: settling them takes about half a millisecond."""
_STEP = 256
"""Buckets moved in one step of a rebuild: about 0.2 ms."""
_DEAD_SHARE = 0.25
"""Entries of abandoned slots that are left lying about, relative to the live ones."""


class CellStore(Holdings):
    """What is written of :class:`~gateway.index.compact.CompactHoldings`, which adds all that is
    read."""

    def __init__(self) -> None:
        super().__init__()
        self._cells = Cells(_SMALLEST)
        self._old: Cells | None = None
        self._moved = 0
        """Buckets of ``_old`` that are done."""
        self._clearing: list[Slot] = []
        """Abandoned slots that are gone for good once the rebuild is over."""
        self._sets = HolderSets()
        self._masks = self._sets.masks
        self._keys = 0
        """Cells in use that are not deleted, in both tables."""
        self._dead = 0
        """Entries of abandoned slots, at most."""
        self._waiting = Waiting()

    @property
    def keys(self) -> int:
        """Keys with a holder (some of them perhaps abandoned)."""
        self.settle()
        return self._keys

    @property
    def entries(self) -> int:
        """(key, live slot) pairs."""
        self.settle()
        return self._entries

    @property
    def bound(self) -> int:
        """What ``entries`` is at most."""
        return self._entries + self._waiting.added

    @property
    def nbytes(self) -> int:
        """Memory of the tables."""
        tables = [self._cells, *([] if self._old is None else [self._old])]
        return sum(cells.size * 12 for cells in tables)

    # -------------------------------------------------------------- slots

    def abandon(self, slot: Slot) -> None:
        """Give up a slot and all it holds; O(1), once what was put off is done."""
        self.settle()
        self._dead += slot.count
        super().abandon(slot)
        if not self._entries:
            # Nobody holds anything: begin anew.
            self._free += [gone.index for gone in (*self._dying, *self._clearing)]
            self._dying.clear()
            self._clearing = []
            self._cells, self._old, self._keys, self._dead = Cells(_SMALLEST), None, 0, 0
            self._sets = HolderSets()
            self._masks = self._sets.masks

    # -------------------------------------------------------------- changes

    def add(self, slot: Slot, keys: Iterable[int], *, nested: bool = False) -> None:
        """See :class:`Holdings`; put off."""
        if not nested:
            self.doubt(slot)
        self._waiting.add(slot.bit, [key or ZERO_STANDS_FOR for key in keys])
        if len(self._waiting) >= _PUT_OFF:
            self.settle()

    def remove(self, slot: Slot, keys: Iterable[int], *, nested: bool = False) -> None:
        """See :class:`Holdings`; put off."""
        if not nested:
            self.doubt(slot)
        self._waiting.remove(slot.bit, [key or ZERO_STANDS_FOR for key in keys])
        if len(self._waiting) >= _PUT_OFF:
            self.settle()

    def settle(self) -> None:
        """Carry out what was put off, all of it at once."""
        if not self._waiting:
            return
        wanted, kinds, changes = self._waiting.take()
        before = self._keys
        self._merge(np.array(wanted, dtype=np.uint64), np.array(kinds, dtype=np.int64), changes)
        if self._keys > before or self._old is not None:
            self._keep_pace(len(wanted))

    def _merge(self, keys: Keys, kinds: Places, changes: Sequence[Change]) -> None:
        """Change who holds each of ``keys``, each once, by the change of its kind."""
        if self._old is not None:
            at = self._old.find_all(keys)
            # What was moved out of the old table, or deleted there, is none of its any more.
            there = (at >= 0) & (self._old.values[at] > DELETED)
            self._rewrite(self._old, at[there], kinds[there], changes)
            keys, kinds = keys[~there], kinds[~there]
        at = self._cells.find_all(keys)
        there = at >= 0
        self._rewrite(self._cells, at[there], kinds[there], changes)
        new = ~there & np.array([added != 0 for added, _ in changes])[kinds]
        keys, kinds = keys[new], kinds[new]
        for (added, _), count in zip(changes, np.bincount(kinds).tolist(), strict=False):
            self._recount(0, added, count)
        self._insert(keys, kinds, [added for added, _ in changes])

    def _rewrite(self, cells: Cells, at: Places, kinds: Places, changes: Sequence[Change]) -> None:
        """Other holders for these cells, by the kind of each; slots that were given up leave."""
        kept, width = self._live | self._lower, len(changes)
        pairs = cells.values[at].astype(np.int64) * width + kinds
        pairs, inverse, counts = np.unique(pairs, return_inverse=True, return_counts=True)
        after, given_up = np.empty(pairs.size, dtype=np.uint32), []
        for place, (pair, count) in enumerate(zip(pairs.tolist(), counts.tolist(), strict=True)):
            before, kind = divmod(pair, width)
            added, removed = changes[kind]
            mask = self._masks[before] & kept
            left = mask & ~removed | added
            if left == self._masks[before]:
                after[place] = before
                continue
            self._recount(mask, left, count)
            self._keys += count * ((left != 0) - (before != DELETED))
            after[place] = self._sets.take(left, count) if left else DELETED
            given_up.append((before, count))
        for before, count in given_up:
            self._sets.release(before, count)
        cells.values[at] = after[inverse]

    def _recount(self, before: int, after: int, count: int) -> None:
        """So many keys went from one set of holders to another."""
        for bits, more in ((after & ~before, count), (before & ~after, -count)):
            self._entries += more * bits.bit_count()
            left = bits
            while left:
                low = left & -left
                slot = self._slots[low.bit_length() - 1]
                assert slot is not None
                slot.count += more
                left ^= low

    def _insert(self, keys: Keys, kinds: Places, masks: Sequence[int]) -> None:
        """Keys that are in neither table, each once, with the holders of their kind."""
        if not keys.size:
            return
        if self._cells.used + keys.size > self._cells.size * 0.9:
            self._rebuild_at_once(int(keys.size))
        self._keys += int(keys.size)
        counts = np.bincount(kinds, minlength=len(masks)).tolist()
        ids = [self._sets.take(mask, n) if n else 0 for mask, n in zip(masks, counts, strict=True)]
        self._cells.put_all(keys, np.array(ids, dtype=np.uint32)[kinds])

    # -------------------------------------------------------------- rebuilding

    def _wanted_cells(self, keys: int) -> int:
        return max(_SMALLEST, int(keys * _ROOM / _FULL))

    def _must_rebuild(self) -> bool:
        cells = self._cells
        if cells.used > cells.size * _FULL:
            return True
        if self._dead > self._entries * _DEAD_SHARE + _SMALLEST:
            return True
        return cells.size > 8 * self._wanted_cells(self._keys)

    def _keep_pace(self, keys: int) -> None:
        """Move at least so much as keeps a rebuild ahead of what comes in."""
        if self._old is None and self._must_rebuild():
            self._start_rebuild(0)
        if self._old is not None:
            self._move(max(_STEP // 4, min(4 * _STEP, keys)))

    def _start_rebuild(self, more: int) -> None:
        self._old, self._moved = self._cells, 0
        self._cells = Cells(self._wanted_cells(self._keys + more))
        self._clearing += self._dying
        self._dying.clear()
        self._dead = 0

    def _rebuild_at_once(self, more: int) -> None:
        """Far more keys came at one time than there is room for."""
        if self._old is not None:
            self._move(self._old.buckets)
        self._start_rebuild(more)
        self._move(self._cells.buckets + (0 if self._old is None else self._old.buckets))

    def _move(self, buckets: int) -> None:
        """The next so many buckets of the old table into the new one; at the end it is dropped."""
        old = self._old
        assert old is not None
        end = min(old.buckets, self._moved + buckets)
        cells = slice(self._moved * WIDTH, end * WIDTH)
        self._moved = end
        used = np.flatnonzero(old.values[cells] > DELETED) + cells.start
        if used.size:
            # Abandoned slots leave on this occasion.
            self._rewrite(old, used, np.zeros(used.size, dtype=np.int64), [(0, 0)])
            used = used[old.values[used] > DELETED]
            keys, values = old.keys[used], old.values[used]
            # A key that was deleted in the new table has its cell there.
            at = self._cells.find_all(keys)
            again = at >= 0
            self._cells.values[at[again]] = values[again]
            self._cells.put_all(keys[~again], values[~again])
            old.values[used] = DELETED
        if end == old.buckets:
            self._old = None
            self._free += [slot.index for slot in self._clearing]
            self._clearing = []

    def sweep(self, budget: int) -> int:
        """Go on with a rebuild, or begin one that is due; returns the unused part."""
        if self._old is None and self._must_rebuild():
            self._start_rebuild(0)
        while self._old is not None and budget > 0:
            self._move(_STEP)
            budget -= _STEP * WIDTH
        return budget

    @property
    def swept(self) -> bool:
        """No rebuild is under way or due."""
        return self._old is None and not self._must_rebuild()
