"""Who holds which key, in 17 to 26 bytes a key however many hold it: the storage for large fleets.

Takes over from :class:`~gateway.index.holdings.Holdings` when a table has grown (numpy needed).

    cells[key] -> set id -> masks[set id]     equal sets of holders share an id, counted in ``refs``

The table is *rebuilt* in small steps when it fills up, when many of its cells are deleted or belong
to abandoned slots, or when it has become mostly empty. Meanwhile there are two: new keys go into
``_cells``, and what is still in ``_old`` is found and changed there.

Arrays are quick for thousands of keys and slow for the twenty of a usual batch of events, so
changes are put off (:mod:`gateway.index.waiting`) until there are many, or somebody asks for what
needs them done. Single keys are looked up in both places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

import numpy as np

from gateway.index.cells import (
    DELETED,
    WIDTH,
    ZERO_STANDS_FOR,
    Cells,
    Keys,
    Places,
    as_key,
    as_keys,
)
from gateway.index.holdings import Holdings
from gateway.index.slots import Slot
from gateway.index.waiting import Change, Waiting

_CHUNKS = (16, 240, 4096)
"""Keys probed first, then, then at a time; the first ones one by one."""
_MANY = 24
"""From so many keys on arrays are faster."""
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
        self._waiting = Waiting()

    @classmethod
    def adopt(cls, small: Holdings) -> CompactHoldings:
        """Take over all that a small one holds, its slots included."""
        made = cls()
        made._slots, made._free = small._slots, small._free
        made._free += [slot.index for slot in small._dying]
        made._free += [slot.index for slot in (small._walk.slots if small._walk else ())]
        made._live, made._lower, made._entries = small._live, small._lower, small._entries
        made._nested, made._sworn = small._nested, small._sworn
        kept = made._live | made._lower
        by_mask: dict[int, list[int]] = {}
        for key, mask in small._table.items():
            if mask & kept:
                by_mask.setdefault(mask & kept, []).append(key)
        made._cells = Cells(made._wanted_cells(sum(map(len, by_mask.values()))))
        for mask, keys in by_mask.items():
            made._insert(as_keys(keys), np.zeros(len(keys), dtype=np.int64), [mask])
        return made

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
            self._masks, self._refs, self._ids, self._unused_ids = [0, 0], [0, 0], {}, []

    # -------------------------------------------------------------- changes

    def add(self, slot: Slot, keys: Iterable[int], *, nested: bool = False) -> None:
        """See :class:`Holdings`; put off."""
        self._note(slot, nested)
        self._waiting.add(slot.bit, [key or ZERO_STANDS_FOR for key in keys])
        if len(self._waiting) >= _PUT_OFF:
            self.settle()

    def remove(self, slot: Slot, keys: Iterable[int], *, nested: bool = False) -> None:
        """See :class:`Holdings`; put off."""
        self._note(slot, nested)
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
            after[place] = self._id_of(left, count) if left else DELETED
            given_up.append((before, count))
        for before, count in given_up:
            self._release(before, count)
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
        ids = [self._id_of(mask, n) if n else 0 for mask, n in zip(masks, counts, strict=True)]
        self._cells.put_all(keys, np.array(ids, dtype=np.uint32)[kinds])

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
        self.settle()
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
        key = as_key(key)
        cells, at = self._locate(key)
        mask = 0 if at is None else self._masks[cells.value(at)]
        return self._waiting.changed(key, mask) if self._waiting else mask

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

    def drop(self, excess: int, rng: Random) -> None:
        """Drop about ``excess`` entries: of random keys those with the fewest holders go."""
        self.settle()
        draw, left = np.random.default_rng(rng.getrandbits(64)), excess
        for _ in range(_DROP_ROUNDS):
            if left <= 0 or not self._entries:
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
        self._entries -= gone
        return gone

    def check(self) -> None:
        """Raise ``AssertionError`` if a count disagrees with the tables. O(everything)."""
        self.settle()
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
        if self._entries != sum(slot.count for slot in self._slots if slot is not None):
            raise AssertionError(f"{self._entries} entries counted")
