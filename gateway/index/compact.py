"""Who holds which key, in 17 to 26 bytes a key however many hold it: the storage for large fleets.

Takes over from :class:`~gateway.index.holdings.Holdings` when a table has grown (numpy needed).
Here is how it is looked up, and what is dropped when it is too large; how it changes is in
:mod:`gateway.index.cellstore`.

Many keys are looked up as an array, once what was put off is done. Single ones are looked up both
in the cells and in what was put off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

import numpy as np

from gateway.index.cells import DELETED, Cells, Keys, Places, Values, as_key, as_keys
from gateway.index.cellstore import CellStore
from gateway.index.holdersets import FIRST_SET
from gateway.index.holdings import Holdings
from gateway.index.slots import Slot

_CHUNKS = (16, 240, 4096)
"""Keys probed first, then, then at a time; the first ones one by one."""
_MANY = 24
"""From so many keys on arrays are faster."""
_SAMPLES = 8
"""Cells looked at for each key that is dropped."""
_DROPPED_AT_A_TIME = 4096
_DROP_ROUNDS = 64


class CompactHoldings(CellStore):
    """As :class:`Holdings`, in arrays."""

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

    def _ids_of(self, keys: Keys) -> Values:
        self.settle()
        at = self._cells.find_all(keys)
        ids = self._cells.values[at]
        ids[at < 0] = 0
        if self._old is not None:
            left = np.flatnonzero(ids < FIRST_SET)
            at = self._old.find_all(keys[left])
            ids[left] = np.where(at < 0, 0, self._old.values[at])
        return ids

    def _locate(self, key: int) -> tuple[Cells, int | None]:
        """The table that knows a key, and its cell there; the new one for unknown keys."""
        at = self._cells.find(key)
        if self._old is None or (at is not None and self._cells.value(at) != DELETED):
            return self._cells, at
        old = self._old.find(key)
        if old is not None and self._old.value(old) > DELETED:
            return self._old, old
        return self._cells, at

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

    # -------------------------------------------------------------- dropping

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
                self.doubt(slot)
                gone += count
                mask ^= low
            self._sets.release(set_id, count)
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
        self._sets.check(refs)
        for slot in self._slots:
            if slot is not None and slot.count != sum(1 for m in held.values() if m & slot.bit):
                raise AssertionError(f"{slot.worker}: {slot.count} counted")
        if self._entries != sum(slot.count for slot in self._slots if slot is not None):
            raise AssertionError(f"{self._entries} entries counted")
