"""A compact table from 64-bit ids to 16 bytes and a small counter for each tier.

A dict of objects would take 200 bytes a row, and there is a row for each block of each worker: this
takes some 45. Open addressing in arrays, split into shards so that growing one is short work. Ids
are hashes already, so their bits serve as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from shared.types import Tier

_SHARDS = 64
_SHARD_BITS = 6
_FIRST = 8
_DEAD = 0x8000
_LIVE = 0x4000
_FIELDS = {Tier.GPU: (0, 0x3F), Tier.HOST: (6, 0x0F), Tier.DISK: (10, 0x0F)}
"""Shift and largest value of a tier's count; a full counter stays full until the table is new."""
_COUNTS = 0x3FFF


class _Shard:
    """One open-addressed part: ids, values and marks (0 empty, ``_DEAD``, else live and counts)."""

    __slots__ = ("filled", "ids", "marks", "mask", "used", "values", "width")

    def __init__(self, width: int, size: int = _FIRST) -> None:
        self.width = width
        self.mask = size - 1
        self.ids = array("Q", bytes(8 * size))
        self.marks = array("H", bytes(2 * size))
        self.values = bytearray(width * size)
        self.used = 0
        """Live rows."""
        self.filled = 0
        """Rows that are not empty."""

    def find(self, key: int) -> int | None:
        """Place of a live row."""
        mask, ids, marks = self.mask, self.ids, self.marks
        place = key >> _SHARD_BITS & mask
        while mark := marks[place]:
            if mark != _DEAD and ids[place] == key:
                return place
            place = place + 1 & mask
        return None

    def add(self, key: int) -> int:
        """Place of a new row for a key that has none."""
        if 3 * self.filled >= 2 * self.mask:
            self._rebuild()
        mask, marks = self.mask, self.marks
        place = key >> _SHARD_BITS & mask
        while marks[place] not in (0, _DEAD):
            place = place + 1 & mask
        self.filled += marks[place] == 0
        self.used += 1
        self.ids[place], marks[place] = key, _LIVE
        return place

    def drop(self, place: int) -> None:
        """Take a live row out."""
        self.marks[place] = _DEAD
        self.used -= 1

    def _rebuild(self) -> None:
        size = _FIRST
        while 3 * self.used >= size:
            size *= 2
        old = _Shard.__new__(_Shard)
        for name in _Shard.__slots__:
            setattr(old, name, getattr(self, name))
        self.__init__(self.width, size)  # type: ignore[misc]  # the same object, emptied
        width = self.width
        for place, mark in enumerate(old.marks):
            if mark and mark != _DEAD:
                at = self.add(old.ids[place])
                self.marks[at] = mark
                if width:
                    begin = place * width
                    self.values[at * width : (at + 1) * width] = old.values[begin : begin + width]


class AliasTable:
    """Rows by id.

    :param width: bytes of each row's value; 0 keeps counts alone.
    """

    def __init__(self, width: int = 16) -> None:
        self._width = width
        self._shards = [_Shard(width) for _ in range(_SHARDS)]

    def __len__(self) -> int:
        return sum(shard.used for shard in self._shards)

    @property
    def n_bytes(self) -> int:
        """Memory of the rows."""
        return sum((10 + self._width) * (shard.mask + 1) for shard in self._shards)

    def get(self, key: int) -> bytes | None:
        """Value of a row; None: there is none."""
        shard = self._shards[key % _SHARDS]
        place = shard.find(key)
        if place is None:
            return None
        begin = place * self._width
        return bytes(shard.values[begin : begin + self._width])

    def add(self, key: int, tier: Tier, value: bytes = b"") -> tuple[bool, bool]:
        """One more copy on a tier; a new row takes ``value``. (the row is new, the tier is)."""
        shard = self._shards[key % _SHARDS]
        place = shard.find(key)
        fresh = place is None
        if place is None:
            place = shard.add(key)
            if self._width:
                begin = place * self._width
                shard.values[begin : begin + self._width] = value
        shift, most = _FIELDS[tier]
        count = shard.marks[place] >> shift & most
        if count < most:
            shard.marks[place] += 1 << shift
        return fresh, count == 0

    def copies(self, key: int, tier: Tier) -> int:
        """How many there are on a tier."""
        shard = self._shards[key % _SHARDS]
        place = shard.find(key)
        shift, most = _FIELDS[tier]
        return 0 if place is None else shard.marks[place] >> shift & most

    def remove(self, key: int, tier: Tier) -> bool:
        """One copy less; the row goes with its last one. True: it was the tier's last."""
        shard = self._shards[key % _SHARDS]
        place = shard.find(key)
        if place is None:
            return False
        shift, most = _FIELDS[tier]
        count = shard.marks[place] >> shift & most
        if count in (0, most):
            return False
        shard.marks[place] -= 1 << shift
        if not shard.marks[place] & _COUNTS:
            shard.drop(place)
        return count == 1

    def __iter__(self) -> Iterator[int]:
        for shard in self._shards:
            for place, mark in enumerate(shard.marks):
                if mark and mark != _DEAD:
                    yield shard.ids[place]
