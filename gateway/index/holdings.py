"""Who holds which key, for workers of one stride: the storage below :mod:`gateway.index.table`.

- Each (worker, incarnation) has a *slot*, one bit of a mask. ``table[key]`` is the mask of slots
  that hold the key; equal masks share one int, so bytes per block do not grow with holders.
- Prompts come and go as a whole, so whole lists of keys are changed at once wherever their masks
  are equal: what Python would do key by key is left to dictionaries.
- Giving up a slot is O(1): its bit leaves ``live``, which every look-up is ANDed with. The table is
  walked in bounded slices later, once for all slots that are given up, and only then are they used
  again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, repeat
from operator import itemgetter
from random import Random

from gateway.index.ends import apart, bisected, stepped
from gateway.index.slots import Slot, Walk, by_mask
from shared.types import WorkerId

_FEW = 4
"""So many keys are looked at one by one."""
_SHORT = 64
"""So many keys are walked, whatever is said."""
_LOOKED_THROUGH = 64
"""One look-up in so many walks where a bisection would do, to see holes that nobody told."""
_CHUNKS = (16, 240)
"""Keys probed first, and then at a time: a miss costs little."""
_SAMPLES = 8
"""Random keys looked at to find one to drop."""
_INTERNED_MAX = 1_000_000
_WORTH_SHRINKING = 1024


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
        self._nested = 0
        """Bits of slots that hold whole beginnings of prompts only: who holds a key holds all those
        before it."""
        self._sworn = 0
        """Bits of slots of which that is only said: now and then they are walked all the same."""
        self._turns = 0
        self._free: list[int] = []
        self._dying: list[Slot] = []
        self._walk: Walk | None = None
        self._deck: list[int] = []
        """Keys that may be drawn to be dropped, some of them gone already."""
        self._entries = 0

    @property
    def entries(self) -> int:
        """(key, live slot) pairs."""
        return self._entries

    @property
    def bound(self) -> int:
        """What ``entries`` is at most; nothing has to be done to know it."""
        return self._entries

    def settle(self) -> None:
        """Carry out what was put off: until then a slot's ``count`` is what it was before."""

    @property
    def tiered(self) -> bool:
        """Whether some slot is one of host memory."""
        return self._lower != 0

    @property
    def keys(self) -> int:
        """Keys with a holder (some of them perhaps abandoned)."""
        return len(self._table)

    def open(self, worker: WorkerId, *, lower: bool = False, sworn: bool = False) -> Slot:
        """A new, empty slot.

        :param lower: for what is in host memory.
        :param sworn: that changes leave it ``nested`` will only be said, by somebody else.
        """
        if not self._free:
            self._free.append(len(self._slots))
            self._slots.append(None)
        index = self._free.pop()
        bit = self._interned.setdefault(1 << index, 1 << index)
        slot = self._slots[index] = Slot(worker, index, bit)
        self._nested |= bit
        self._sworn = self._sworn | bit if sworn else self._sworn & ~bit
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
        self._entries -= slot.count
        self._dying.append(slot)

    def add(self, slot: Slot, keys: Iterable[int], *, nested: bool = False) -> None:
        """The slot holds ``keys`` too; those it held already are fine.

        :param nested: it holds all that comes before them as well.
        """
        if not nested:
            self.doubt(slot)
        table, bit, interned = self._table, slot.bit, self._interned
        wanted = keys if isinstance(keys, list) else list(keys)
        added, kept = -len(table), self._live | self._lower
        masks = list(map(table.setdefault, wanted, repeat(bit)))
        added += len(table)
        shared = masks.count(bit) < len(masks)
        for mask, group in by_mask(wanted, masks, besides=bit) if shared else ():
            if not mask & bit:
                both = mask & kept | bit
                table.update(dict.fromkeys(group, interned.setdefault(both, both)))
                added += len(group)
        slot.count += added
        self._entries += added
        self._peak = max(self._peak, len(table))
        if len(interned) > _INTERNED_MAX:
            # Only the sharing of equal masks is lost, and only for those made before.
            interned.clear()

    def remove(self, slot: Slot, keys: Iterable[int], *, nested: bool = False) -> None:
        """The slot holds ``keys`` no longer; those it did not hold are fine.

        :param nested: it holds nothing that comes after them.
        """
        if not nested:
            self.doubt(slot)
        table, bit, interned = self._table, slot.bit, self._interned
        wanted, gone = keys if isinstance(keys, list) else list(keys), len(table)
        masks = list(map(table.pop, wanted, repeat(0)))
        gone -= len(table)
        shared = masks.count(bit) < len(masks)
        for mask, group in by_mask(wanted, masks, besides=bit) if shared else ():
            rest = mask & ~bit
            if rest:  # 0: it was not there
                table.update(dict.fromkeys(group, interned.setdefault(rest, rest)))
                gone -= 0 if mask & bit else len(group)
        slot.count -= gone
        self._entries -= gone

    def doubt(self, slot: Slot) -> None:
        """The slot may hold more than whole beginnings of prompts: it is walked from now on."""
        self._nested &= ~slot.bit

    def holds(self, slot: Slot, key: int) -> bool:
        """Whether the slot holds a key. Pure."""
        return bool((self._mask_of(key) or 0) & slot.bit)

    def holds_any(self, slot: Slot, keys: Sequence[int]) -> bool:
        """Whether the slot holds one of ``keys``. Pure."""
        return any((mask or 0) & slot.bit for mask in map(self._mask_of, keys))

    def depths(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """(depth, mask of the slots whose match ends there), depth > 0."""
        if len(keys) <= _FEW:
            return stepped(self._mask_of, keys, self._live)
        nested = self._live & self._nested
        sworn = nested & self._sworn
        if sworn and len(keys) <= _SHORT:
            nested ^= sworn
        elif sworn:
            self._turns += 1
            if not self._turns % _LOOKED_THROUGH:
                self._look_through(keys, sworn)
                nested = self._live & self._nested
        others = self._live & ~nested
        if not others:
            return bisected(self._mask_of, keys, nested)
        walked = self._walked(keys, others)
        return bisected(self._mask_of, keys, nested) + walked if nested else walked

    def _look_through(self, keys: Sequence[int], sworn: int) -> None:
        """Doubt the slots in which a walk finds a hole."""
        walked = self._walked(keys, sworn)
        self._nested &= ~apart(walked, bisected(self._mask_of, keys, sworn))

    @property
    def _mask_of(self) -> Callable[[int], int | None]:
        """Key -> mask of its holders; None or 0: it has none."""
        return self._table.get

    def _walked(self, keys: Sequence[int], alive: int) -> list[tuple[int, int]]:
        """Of any slots. A match ends at the first key whose mask lacks the slot, which is the first
        appearance of some distinct mask: so it is enough to look at each distinct mask once.
        """
        ends: list[tuple[int, int]] = []
        start, size = 0, _CHUNKS[0]
        while alive and start < len(keys):
            masks = self._masks_of(keys[start : start + size])
            if masks.count(masks[0]) == len(masks) and (masks[0] or 0) & alive == alive:
                start, size = start + size, _CHUNKS[1]
                continue
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

    def _masks_of(self, keys: Sequence[int]) -> Sequence[int | None]:
        """Masks of some keys; None where there is none."""
        if len(keys) > _CHUNKS[0]:
            try:  # a third less than with `get`, if all are there
                return tuple(itemgetter(*keys)(self._table))
            except KeyError:
                pass
        return list(map(self._table.get, keys))

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

    def workers_in(self, mask: int) -> list[WorkerId]:
        """The workers behind a mask of live slots."""
        slots, found = self._slots, []
        while mask:
            low = mask & -mask
            slot = slots[low.bit_length() - 1]
            if slot is not None:
                found.append(slot.worker)
            mask ^= low
        return found

    def sweep(self, budget: int) -> int:
        """Clean up after abandoned slots, at most ``budget`` keys; returns its unused part."""
        while budget > 0 and not self.swept:
            walk = self._walk = self._walk or self._begin_walk()
            batch = list(islice(walk.keys, budget))
            self._clean(batch, walk.bits)
            if len(batch) < budget:
                self._walk = None
                self._free += [slot.index for slot in walk.slots]
                self._shrink()
            budget -= len(batch)
        return budget

    @property
    def swept(self) -> bool:
        """No abandoned slot is left to be cleaned up."""
        return not self._dying and self._walk is None

    def drop(self, excess: int, rng: Random) -> None:
        """Drop about ``excess`` entries: of a few random keys that with the fewest holders goes."""
        while excess > 0 and self._entries > 0:
            if not self._deck or len(self._deck) < len(self._table) // 2:
                self._deck = list(self._table)
            found = self._draw(rng)
            if found is None:
                continue
            mask = self._table[found] & (self._live | self._lower)
            for slot in self._slots:
                if slot is not None and mask & slot.bit:
                    self.remove(slot, [found])
                    excess -= 1

    def _draw(self, rng: Random) -> int | None:
        """Of some keys of the deck the one that fewest hold; those that are gone leave it."""
        deck, kept = self._deck, self._live | self._lower
        best, fewest = None, 0
        for _ in range(_SAMPLES):
            if not deck:
                break
            at = rng.randrange(len(deck))
            holders = (self._table.get(deck[at], 0) & kept).bit_count()
            if not holders:
                deck[at] = deck[-1]
                deck.pop()
            elif best is None or holders < fewest:
                best, fewest = deck[at], holders
        return best

    def check(self) -> None:
        """Raise ``AssertionError`` if a count disagrees with the table. O(everything)."""
        slots = [slot for slot in self._slots if slot is not None]
        for slot in slots:
            held = sum(1 for mask in self._table.values() if mask & slot.bit)
            if held != slot.count:
                raise AssertionError(f"{slot.worker}: {held} held, {slot.count} counted")
        if self._entries != sum(slot.count for slot in slots):
            raise AssertionError(f"{self._entries} entries counted")
        gone = ~(self._live | self._lower)
        if self.swept and any(mask & gone for mask in self._table.values()):
            raise AssertionError("a swept slot is still in the table")
        if not all(self._table.values()):
            raise AssertionError("a key without holders is kept")

    def _begin_walk(self) -> Walk:
        slots, self._dying = self._dying, []
        bits = sum(slot.bit for slot in slots)
        if not any(slot.count for slot in slots):
            return Walk(slots, bits, iter(()))
        return Walk(slots, bits, iter(list(self._table)))

    def _clean(self, keys: list[int], bits: int) -> None:
        table = self._table
        for key in keys:
            mask = table.get(key, 0)
            if mask & bits:
                rest = mask & ~bits
                if rest:
                    table[key] = rest
                else:
                    del table[key]

    def _shrink(self) -> None:
        """A dict keeps its memory when entries go: copy one that has become mostly empty."""
        if self._peak >= _WORTH_SHRINKING and len(self._table) * 8 < self._peak:
            self._table = dict(self._table)
            self._peak = len(self._table)
        if not self._table:
            self._interned.clear()
