"""Who holds which key, in 17 to 26 bytes a key however many hold it: the storage for large fleets.

Takes over from :class:`~gateway.index.holdings.Holdings` when a table has grown (numpy needed).

    cells[key] -> set id -> masks[set id]     equal sets of holders share an id, counted in ``refs``

The table is *rebuilt* in small steps when it fills up, when many of its cells are deleted or belong
to abandoned slots, or when it has become mostly empty. Meanwhile there are two: new keys go into
``_cells``, and what is still in ``_old`` is found and changed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

import numpy as np

from gateway.index.cells import DELETED, WIDTH, Cells, Keys, Places, as_key, as_keys
from gateway.index.holdings import Holdings
from gateway.index.slots import Slot

_CHUNKS = (16, 240, 4096)
"""Keys probed first, then, then at a time; the first ones one by one."""
_MANY = 24
"""From so many keys on arrays are faster."""
_FULL = 0.7
_ROOM = 1.5
"""A new table has this many times the cells that its keys need at ``_FULL``."""
_SMALLEST = 1024
_STEP = 256
"""Buckets moved in one step of a rebuild: about 0.2 ms."""
_DEAD_SHARE = 0.25
"""Entries of abandoned slots that are left lying about, relative to the live ones."""
_SAMPLES = 8
"""Cells looked at for each key that is dropped."""
_DROPPED_AT_A_TIME = 4096
_DROP_ROUNDS = 64
_MASK_KEPT = 2
"""First set id: 0 is an unused cell and 1 a deleted one."""


class CompactHoldings(Holdings):
    """As :class:`Holdings`, in arrays."""

    def __init__(self) -> None:
        super().__init__()
        self._cells = Cells(_SMALLEST)
        self._old: Cells | None = None
        self._moved = 0
        """Buckets of ``_old`` that are done."""
        self._clearing: list[Slot] = []
        """Abandoned slots that are gone for good once the rebuild is over."""
        self._masks: list[int] = [0, 0]
        self._refs: list[int] = [0, 0]
        self._ids: dict[int, int] = {}
        self._unused_ids: list[int] = []
        self._keys = 0
        """Cells in use that are not deleted, in both tables."""
        self._dead = 0
        """Entries of abandoned slots, at most."""

    @classmethod
    def adopt(cls, small: Holdings) -> CompactHoldings:
        """Take over all that a small one holds, its slots included."""
        made = cls()
        made._slots, made._free = small._slots, small._free
        made._free += [slot.index for slot in small._dying]
        made._free += [slot.index for slot in (small._walk.slots if small._walk else ())]
        made._live, made._lower, made.entries = small._live, small._lower, small.entries
        made._nested, made._sworn = small._nested, small._sworn
        kept = made._live | made._lower
        by_mask: dict[int, list[int]] = {}
        for key, mask in small._table.items():
            if mask & kept:
                by_mask.setdefault(mask & kept, []).append(key)
        made._cells = Cells(made._wanted_cells(sum(map(len, by_mask.values()))))
        for mask, keys in by_mask.items():
            made._insert(as_keys(keys), mask)
        return made

    @property
    def keys(self) -> int:
        """Keys with a holder (some of them perhaps abandoned)."""
        return self._keys

    @property
    def nbytes(self) -> int:
        """Memory of the tables."""
        tables = [self._cells, *([] if self._old is None else [self._old])]
        return sum(cells.size * 12 for cells in tables)

    # -------------------------------------------------------------- slots

    def abandon(self, slot: Slot) -> None:
        """Give up a slot and all it holds; O(1)."""
        self._dead += slot.count
        super().abandon(slot)
        if not self.entries:
            # Nobody holds anything: begin anew.
            self._free += [gone.index for gone in (*self._dying, *self._clearing)]
            self._dying.clear()
            self._clearing = []
            self._cells, self._old, self._keys, self._dead = Cells(_SMALLEST), None, 0, 0
            self._masks, self._refs, self._ids, self._unused_ids = [0, 0], [0, 0], {}, []

    # -------------------------------------------------------------- changes

    def add(self, slot: Slot, keys: Iterable[int], *, nested: bool = False) -> None:
        """See :class:`Holdings`."""
        self._note(slot, nested)
        wanted = list(keys)
        before = self._keys
        if len(wanted) < _MANY:
            added = sum(self._add_one(slot, as_key(key)) for key in wanted)
        else:
            added = self._add_many(slot, np.unique(as_keys(wanted)))
        slot.count += added
        self.entries += added
        self._keep_pace(len(wanted) if self._keys > before or self._old is not None else 0)

    def _add_one(self, slot: Slot, key: int) -> bool:
        cells, at = self._locate(key)
        if at is None:
            if self._cells.used >= self._cells.size * 0.9:
                self._rebuild_at_once(1)
            self._cells.put(key, self._id_of(slot.bit, 1))
            self._keys += 1
            return True
        before = cells.value(at)
        mask = self._masks[before]
        if mask & slot.bit:
            return False
        cells.set(at, self._id_of(mask & (self._live | self._lower) | slot.bit, 1))
        self._release(before, 1)
        self._keys += before == DELETED
        return True

    def _add_many(self, slot: Slot, keys: Keys) -> int:
        added = 0
        for cells in (self._cells, self._old):
            if cells is None or not keys.size:
                continue
            at = cells.find_all(keys)
            # What was moved out of the old table, or deleted there, is none of its any more.
            there = at >= 0 if cells is self._cells else (at >= 0) & (cells.values[at] > DELETED)
            added += self._change(cells, at[there], add=slot.bit)
            keys = keys[~there]
        if keys.size:
            self._insert(keys, slot.bit)
        return added + int(keys.size)

    def _insert(self, keys: Keys, mask: int) -> None:
        """Keys that are in neither table, each once."""
        if self._cells.used + keys.size > self._cells.size * 0.9:
            self._rebuild_at_once(int(keys.size))
        self._keys += int(keys.size)
        set_id = self._id_of(mask, int(keys.size))
        self._cells.put_all(keys, np.full(keys.size, set_id, dtype=np.uint32))

    def _change(self, cells: Cells, at: Places, *, add: int = 0, remove: int = 0) -> int:
        """Add to or take from the holders in these cells; returns in how many that changed any."""
        kept = self._live | self._lower
        ids, inverse, counts = np.unique(cells.values[at], return_inverse=True, return_counts=True)
        changed, after = 0, np.empty_like(ids)
        for place, (before, count) in enumerate(zip(ids.tolist(), counts.tolist(), strict=True)):
            mask = self._masks[before]
            if (mask & add) if add else not (mask & remove):
                after[place] = before
                continue
            changed += count
            left = mask & kept & ~remove | add
            self._keys += count * ((left != 0) - (before != DELETED))
            after[place] = self._id_of(left, count) if left else DELETED
        for place, (before, count) in enumerate(zip(ids.tolist(), counts.tolist(), strict=True)):
            if after[place] != before:
                self._release(before, count)
        cells.values[at] = after[inverse]
        return changed

    def remove(self, slot: Slot, keys: Iterable[int], *, nested: bool = False) -> None:
        """See :class:`Holdings`."""
        self._note(slot, nested)
        wanted = list(keys)
        if len(wanted) < _MANY:
            gone = sum(self._remove_one(slot, as_key(key)) for key in wanted)
        else:
            gone, left = 0, np.unique(as_keys(wanted))
            for cells in (self._cells, self._old):
                if cells is not None:
                    at = cells.find_all(left)
                    gone += self._change(cells, at[at >= 0], remove=slot.bit)
        slot.count -= gone
        self.entries -= gone
        if self._old is not None:
            self._keep_pace(len(wanted))

    def _remove_one(self, slot: Slot, key: int) -> bool:
        cells, at = self._locate(key)
        if at is None:
            return False
        before = cells.value(at)
        mask = self._masks[before]
        if not mask & slot.bit:
            return False
        left = mask & (self._live | self._lower) & ~slot.bit
        cells.set(at, self._id_of(left, 1) if left else DELETED)
        self._release(before, 1)
        self._keys -= not left
        return True

    def _locate(self, key: int) -> tuple[Cells, int | None]:
        """The table that knows a key, and its cell there; the new one for unknown keys."""
        at = self._cells.find(key)
        if self._old is None or (at is not None and self._cells.value(at) != DELETED):
            return self._cells, at
        old = self._old.find(key)
        if old is not None and self._old.value(old) > DELETED:
            return self._old, old
        return self._cells, at

    def _id_of(self, mask: int, uses: int) -> int:
        found = self._ids.get(mask)
        if found is None:
            if self._unused_ids:
                found = self._unused_ids.pop()
                self._masks[found], self._refs[found] = mask, 0
            else:
                found = len(self._masks)
                self._masks.append(mask)
                self._refs.append(0)
            self._ids[mask] = found
        self._refs[found] += uses
        return found

    def _release(self, set_id: int, uses: int) -> None:
        if set_id < _MASK_KEPT or not uses:
            return
        self._refs[set_id] -= uses
        if not self._refs[set_id]:
            del self._ids[self._masks[set_id]]
            self._unused_ids.append(set_id)

    # -------------------------------------------------------------- look-ups

    def _walked(self, keys: Sequence[int], alive: int) -> list[tuple[int, int]]:
        ends: list[tuple[int, int]] = []
        start, turn = 0, 0
        while alive and start < len(keys):
            size = _CHUNKS[min(turn, 2)]
            piece = keys[start : start + size]
            for offset, mask in self._runs(piece):
                kept = alive & mask
                if kept == alive:
                    continue
                if start + offset:
                    ends.append((start + offset, alive ^ kept))
                if not kept:
                    return ends
                alive = kept
            start, turn = start + size, turn + 1
        if keys and alive:
            ends.append((len(keys), alive))
        return ends

    def _runs(self, keys: Sequence[int]) -> Iterable[tuple[int, int]]:
        """(first place, holders) of each run of keys with the same holders."""
        if len(keys) < _MANY:
            return enumerate(map(self._mask, keys))
        ids = self._ids_of(as_keys(keys))
        starts = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        masks = self._masks
        places = [0, *starts.tolist()]
        return [
            (at, masks[set_id]) for at, set_id in zip(places, ids[places].tolist(), strict=True)
        ]

    def _ids_of(self, keys: Keys) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
        at = self._cells.find_all(keys)
        ids = self._cells.values[at]
        ids[at < 0] = 0
        if self._old is not None:
            left = np.flatnonzero(ids < _MASK_KEPT)
            at = self._old.find_all(keys[left])
            ids[left] = np.where(at < 0, 0, self._old.values[at])
        return ids

    @property
    def _mask_of(self) -> Callable[[int], int | None]:
        return self._mask

    def _mask(self, key: int) -> int:
        cells, at = self._locate(as_key(key))
        return 0 if at is None else self._masks[cells.value(at)]

    def holds_any(self, slot: Slot, keys: Sequence[int]) -> bool:
        """Whether the slot holds one of ``keys``. Pure."""
        if len(keys) < _MANY:
            return super().holds_any(slot, keys)
        masks = map(self._masks.__getitem__, np.unique(self._ids_of(as_keys(keys))).tolist())
        return any(mask & slot.bit for mask in masks)

    def lower_at(self, key: int) -> list[Slot]:
        """The slots of host memory that hold a key."""
        mask = self._mask(key) & self._lower
        return [s for s in self._slots if s is not None and mask & s.bit] if mask else []

    def end_of_run(self, keys: Sequence[int], start: int, bits: int) -> int:
        """First place from ``start`` on whose key no slot of ``bits`` holds, or the end."""
        for at in range(start, len(keys)):
            if not self._mask(keys[at]) & bits:
                return at
        return len(keys)

    # -------------------------------------------------------------- rebuilding

    def _wanted_cells(self, keys: int) -> int:
        return max(_SMALLEST, int(keys * _ROOM / _FULL))

    def _must_rebuild(self) -> bool:
        cells = self._cells
        if cells.used > cells.size * _FULL:
            return True
        if self._dead > self.entries * _DEAD_SHARE + _SMALLEST:
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
            self._change(old, used, remove=~(self._live | self._lower))
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

    def drop(self, excess: int, rng: Random) -> None:
        """Drop about ``excess`` entries: of random keys those with the fewest holders go."""
        draw, left = np.random.default_rng(rng.getrandbits(64)), excess
        for _ in range(_DROP_ROUNDS):
            if left <= 0 or not self.entries:
                return
            cells = self._cells
            if self._old is not None:
                waiting = self._old.used * (1 - self._moved / self._old.buckets)
                if rng.random() * (waiting + cells.used) < waiting:
                    cells = self._old
            n = min(left, _DROPPED_AT_A_TIME)
            at = np.unique(draw.integers(0, cells.size, _SAMPLES * n + 64))
            # In the order of cells those in front would always go, and the rest crowd together.
            draw.shuffle(at)
            left -= self._drop_from(cells, at[cells.values[at] > DELETED], n)

    def _drop_from(self, cells: Cells, at: Places, n: int) -> int:
        """Of the keys in these cells drop ``n`` with few holders; returns how many entries went."""
        kept = self._live | self._lower
        ids, inverse = np.unique(cells.values[at], return_inverse=True)
        holders = np.array([(self._masks[i] & kept).bit_count() for i in ids.tolist()], dtype=int)
        chosen = np.argsort(holders[inverse], kind="stable")[:n] if at.size else at
        chosen = chosen[: int(np.searchsorted(np.cumsum(holders[inverse[chosen]]), n)) + 1]
        gone = 0
        counts = np.bincount(inverse[chosen], minlength=ids.size)
        for set_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
            mask = self._masks[set_id] & kept if count else 0
            while mask:
                low = mask & -mask
                slot = self._slots[low.bit_length() - 1]
                assert slot is not None
                slot.count -= count
                self._note(slot, nested=False)
                gone += count
                mask ^= low
            self._release(set_id, count)
        cells.values[at[chosen]] = DELETED
        self._keys -= int(chosen.size)
        self.entries -= gone
        return gone

    def check(self) -> None:
        """Raise ``AssertionError`` if a count disagrees with the tables. O(everything)."""
        held: dict[int, int] = {}
        refs: dict[int, int] = {}
        for cells in (self._cells, *([] if self._old is None else [self._old])):
            if cells.used != int((cells.values != 0).sum()):
                raise AssertionError("used cells are counted wrongly")
            for at in np.flatnonzero(cells.values > DELETED).tolist():
                if cells.key(at) in held:
                    raise AssertionError("a key is there twice")
                held[cells.key(at)] = self._masks[cells.value(at)]
                refs[cells.value(at)] = refs.get(cells.value(at), 0) + 1
        if len(held) != self._keys:
            raise AssertionError(f"{len(held)} keys, {self._keys} counted")
        if any(self._refs[set_id] != n for set_id, n in refs.items()):
            raise AssertionError("references are counted wrongly")
        if set(self._ids.values()) != set(refs):
            raise AssertionError("a set without keys is kept")
        for slot in self._slots:
            if slot is not None and slot.count != sum(1 for m in held.values() if m & slot.bit):
                raise AssertionError(f"{slot.worker}: {slot.count} counted")
        if self.entries != sum(slot.count for slot in self._slots if slot is not None):
            raise AssertionError(f"{self.entries} entries counted")
