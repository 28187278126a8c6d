"""Who holds which key, for workers of one stride: the storage below :mod:`gateway.index.table`.

- Each (worker, incarnation) has a *slot*, one bit of a mask. ``table[key]`` is the mask of slots
  that hold the key; equal masks share one int, so bytes per block do not grow with holders.
- Each slot logs the keys it got (8 bytes each). Only that makes it possible to take a worker out
  without walking the whole table, and to pick a random entry when there are too many.
- Giving up a slot is O(1): its bit leaves ``live``, which every look-up is ANDed with. Its log is
  swept in bounded slices later, and only then is the slot used again.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from shared.types import WorkerId

_PARTS = 16
"""Logs are split by key, so that ridding one part of stale entries is short work."""
_CHUNKS = (16, 240)
"""Keys probed first, and then at a time: a miss costs little."""
_SAMPLES = 8
"""Random entries looked at to find one to drop."""
_DRAWS = 32
_LOG_SLACK = 64
"""Stale entries that a part of a log may have whatever its length."""
_INTERNED_MAX = 1_000_000
_WORTH_SHRINKING = 1024


def _empty_log() -> list[array[int]]:
    return [array("Q") for _ in range(_PARTS)]


@dataclass(slots=True)
class Slot:
    """Contents of one incarnation of a worker."""

    worker: WorkerId
    index: int
    bit: int
    log: list[array[int]] = field(default_factory=_empty_log)
    limits: list[int] = field(default_factory=lambda: [_LOG_SLACK] * _PARTS)
    """Length at which a part of the log is rid of stale and double entries."""
    count: int = 0
    """Keys held."""


class Holdings:
    """Key -> holders, for any number of slots."""

    def __init__(self) -> None:
        self._table: dict[int, int] = {}
        self._peak = 0
        self._interned: dict[int, int] = {}
        self._slots: list[Slot | None] = []
        self._live = 0
        """Bits of slots that say what is on a device."""
        self._lower = 0
        """Bits of slots that say what is in host memory."""
        self._free: list[int] = []
        self._dying: deque[Slot] = deque()
        self.entries = 0
        """(key, live slot) pairs."""

    @property
    def tiered(self) -> bool:
        """Whether some slot is one of host memory."""
        return self._lower != 0

    @property
    def keys(self) -> int:
        """Keys with a holder (some of them perhaps abandoned)."""
        return len(self._table)

    def open(self, worker: WorkerId, *, lower: bool = False) -> Slot:
        """A new, empty slot; ``lower``: for what is in host memory."""
        if not self._free:
            self._free.append(len(self._slots))
            self._slots.append(None)
        index = self._free.pop()
        bit = self._interned.setdefault(1 << index, 1 << index)
        slot = self._slots[index] = Slot(worker, index, bit)
        if lower:
            self._lower |= bit
        else:
            self._live |= bit
        return slot

    def abandon(self, slot: Slot) -> None:
        """Give up a slot and all it holds; O(1), the memory comes back through :meth:`sweep`."""
        self._live &= ~slot.bit
        self._lower &= ~slot.bit
        self._slots[slot.index] = None
        self.entries -= slot.count
        slot.count = 0
        self._dying.append(slot)

    def add(self, slot: Slot, keys: Iterable[int]) -> None:
        """The slot holds ``keys`` too; those it held already are fine."""
        table, bit, log, limits = self._table, slot.bit, slot.log, slot.limits
        live, interned = self._live | self._lower, self._interned
        added = 0
        for key in keys:
            mask = table.get(key)
            if mask is None:
                table[key] = bit
            elif mask & bit:
                continue
            else:
                both = mask & live | bit
                table[key] = interned.setdefault(both, both)
            added += 1
            part = log[key % _PARTS]
            part.append(key)
            if len(part) > limits[key % _PARTS]:
                self._compact(slot, key % _PARTS)
        slot.count += added
        self.entries += added
        self._peak = max(self._peak, len(table))
        if len(interned) > _INTERNED_MAX:
            # Only the sharing of equal masks is lost, and only for those made before.
            interned.clear()

    def remove(self, slot: Slot, keys: Iterable[int]) -> None:
        """The slot holds ``keys`` no longer; those it did not hold are fine."""
        table, bit, interned = self._table, slot.bit, self._interned
        gone = 0
        for key in keys:
            mask = table.get(key)
            if mask is None or not mask & bit:
                continue
            gone += 1
            rest = mask ^ bit
            if rest:
                table[key] = interned.setdefault(rest, rest)
            else:
                del table[key]
        slot.count -= gone
        self.entries -= gone

    def depths(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """(depth, mask of the slots whose match ends there), depth > 0. Pure.

        A slot's match ends at the first key whose mask lacks it, which is the first appearance of
        some distinct mask: so it is enough to look at each distinct mask once.
        """
        ends: list[tuple[int, int]] = []
        get, alive = self._table.get, self._live
        start, size = 0, _CHUNKS[0]
        while start < len(keys):
            masks = list(map(get, keys[start : start + size]))
            at = 0
            for mask in dict.fromkeys(masks):
                kept = 0 if mask is None else alive & mask
                if kept == alive:
                    continue
                at = masks.index(mask, at)
                if start + at:
                    ends.append((start + at, alive ^ kept))
                if not kept:
                    return ends
                alive = kept
            start, size = start + size, _CHUNKS[1]
        if start and alive:
            ends.append((len(keys), alive))
        return ends

    def lower_at(self, key: int) -> list[Slot]:
        """The slots of host memory that hold a key."""
        mask = self._table.get(key, 0) & self._lower
        slots = []
        while mask:
            low = mask & -mask
            slot = self._slots[low.bit_length() - 1]
            if slot is not None:
                slots.append(slot)
            mask ^= low
        return slots

    def end_of_run(self, keys: Sequence[int], start: int, bits: int) -> int:
        """First place from ``start`` on whose key no slot of ``bits`` holds, or the end."""
        get = self._table.get
        for at in range(start, len(keys)):
            if not get(keys[at], 0) & bits:
                return at
        return len(keys)

    def workers_in(self, mask: int) -> Iterator[WorkerId]:
        """The workers behind a mask of live slots."""
        while mask:
            low = mask & -mask
            slot = self._slots[low.bit_length() - 1]
            if slot is not None:
                yield slot.worker
            mask ^= low

    def sweep(self, budget: int) -> int:
        """Clean up after abandoned slots, at most ``budget`` entries; returns its unused part."""
        while self._dying and budget > 0:
            slot = self._dying[0]
            budget = self._sweep_slot(slot, budget)
            if any(slot.log):
                break
            self._dying.popleft()
            self._free.append(slot.index)
            self._shrink()
        return budget

    @property
    def swept(self) -> bool:
        """No abandoned slot is left to be cleaned up."""
        return not self._dying

    def drop(self, excess: int, rng: Random) -> None:
        """Drop about ``excess`` entries: of a few random ones that with the fewest holders goes."""
        slots = [slot for slot in self._slots if slot is not None and slot.count]
        weights = list(accumulate(slot.count for slot in slots))
        for _ in range(excess if slots else 0):
            found: list[tuple[int, int, Slot]] = []
            # Logs hold stale entries too. If a round finds nothing else, the next makes up for it.
            for slot in rng.choices(slots, cum_weights=weights, k=_DRAWS):
                part = slot.log[rng.randrange(_PARTS)]
                key = part[rng.randrange(len(part))] if part else 0
                mask = self._table.get(key, 0)
                if mask & slot.bit:
                    found.append((mask.bit_count(), key, slot))
                    if len(found) == _SAMPLES:
                        break
            if found:
                _, key, slot = min(found, key=lambda item: item[0])
                self.remove(slot, (key,))

    def check(self) -> None:
        """Raise ``AssertionError`` if a count or a log disagrees with the table. O(everything)."""
        slots = [slot for slot in self._slots if slot is not None]
        for slot in slots:
            held = {key for key, mask in self._table.items() if mask & slot.bit}
            logged = {key for part in slot.log for key in part}
            if len(held) != slot.count or not held <= logged:
                raise AssertionError(f"{slot.worker}: {len(held)} held, {slot.count} counted")
        if self.entries != sum(slot.count for slot in slots):
            raise AssertionError(f"{self.entries} entries counted")
        gone = ~(self._live | self._lower)
        if not self._dying and any(mask & gone for mask in self._table.values()):
            raise AssertionError("a swept slot is still in the table")

    def _compact(self, slot: Slot, part: int) -> None:
        get, bit = self._table.get, slot.bit
        held = {key for key in slot.log[part] if (get(key) or 0) & bit}
        slot.log[part] = array("Q", held)
        slot.limits[part] = 2 * len(held) + _LOG_SLACK

    def _sweep_slot(self, slot: Slot, budget: int) -> int:
        table, bit = self._table, slot.bit
        for part in slot.log:
            while part and budget > 0:
                budget -= 1
                key = part.pop()
                mask = table.get(key)
                if mask is None or not mask & bit:
                    continue
                if mask == bit:
                    del table[key]
                else:
                    table[key] = mask ^ bit
        return budget

    def _shrink(self) -> None:
        """A dict keeps its memory when entries go: copy one that has become mostly empty."""
        if self._peak >= _WORTH_SHRINKING and len(self._table) * 8 < self._peak:
            self._table = dict(self._table)
            self._peak = len(self._table)
        if not self._table:
            self._interned.clear()
