"""A compact table from 64-bit ids to 16 bytes and a small counter for each tier.

A dict of objects would take 200 bytes a row, and there is a row for each block of each worker: this
takes some 45. Open addressing in arrays, split into shards so that growing one is short work. Ids
are hashes already, so their bits serve as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntFlag

from shared.types import Tier

_SHARDS = 64
_SHARD_BITS = 6
_FIRST = 8
_DEAD = 0x8000
_LIVE = 0x4000
_FIELDS = {Tier.GPU: (0, 0x3F), Tier.HOST: (6, 0x0F), Tier.DISK: (10, 0x0F)}
"""Shift and largest value of a tier's count; a full counter stays full until the table is new."""
_COUNTS = 0x3FFF


class Added(IntFlag):
    """What a further copy of a block was."""

    COPY = 0
    """It was on that tier already."""
    TIER = 1
    """The first on its tier."""
    ROW = 2
    """The first of all."""


class _Shard:
    """One open-addressed part: ids, values and marks (0 empty, ``_DEAD``, else live and counts)."""

    __slots__ = ("filled", "ids", "marks", "room", "size", "used", "values", "width")

    def __init__(self, width: int, size: int = _FIRST) -> None:
        self.width, self.size = width, size
        self.room = size * 3 // 4
        """Rows that may be filled."""
        self.ids = array("Q", bytes(8 * size))
        self.marks = array("H", bytes(2 * size))
        self.values = bytearray(width * size)
        self.used = 0
        """Live rows."""
        self.filled = 0
        """Rows that are not empty."""

    def find(self, key: int) -> int | None:
        """Place of a live row."""
        size, ids, marks = self.size, self.ids, self.marks
        place = (key >> _SHARD_BITS) % size
        while mark := marks[place]:
            if ids[place] == key and mark != _DEAD:
                return place
            place += 1
            if place == size:
                place = 0
        return None

    def insert(self, key: int, mark: int, value: bytes) -> None:
        """A row for a key that has none."""
        size, marks = self.size, self.marks
        place = (key >> _SHARD_BITS) % size
        while marks[place] & _LIVE:
            place += 1
            if place == size:
                place = 0
        if not marks[place]:
            self.filled += 1
        self.used += 1
        self.ids[place], marks[place] = key, mark
        if width := self.width:
            self.values[place * width : (place + 1) * width] = value

    def grown(self) -> _Shard:
        """The same rows with room for half as many more, and nothing dead among them."""
        size = max(_FIRST, self.used * 2 + 1)
        larger = _Shard(self.width, size)
        width, values, marks, ids = self.width, larger.values, larger.marks, larger.ids
        for at, (key, mark) in enumerate(zip(self.ids, self.marks, strict=True)):
            if not mark & _LIVE:
                continue
            # As ``insert``, without its calls: this is where most time goes.
            place = (key >> _SHARD_BITS) % size
            while marks[place]:
                place += 1
                if place == size:
                    place = 0
            ids[place], marks[place] = key, mark
            if width:
                begin = at * width
                values[place * width : (place + 1) * width] = self.values[begin : begin + width]
        larger.used = larger.filled = self.used
        return larger


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
        return sum((10 + self._width) * shard.size for shard in self._shards)

    def get(self, key: int) -> bytes | None:
        """Value of a row; None: there is none."""
        shard = self._shards[key % _SHARDS]
        place = shard.find(key)
        if place is None:
            return None
        begin = place * self._width
        return bytes(shard.values[begin : begin + self._width])

    def add(self, key: int, tier: Tier, value: bytes = b"") -> Added:
        """One more copy on a tier; a new row takes ``value``."""
        shard = self._shards[key % _SHARDS]
        shift, most = _FIELDS[tier]
        place = shard.find(key)
        if place is None:
            if shard.filled >= shard.room:
                shard = self._shards[key % _SHARDS] = shard.grown()
            shard.insert(key, _LIVE | 1 << shift, value)
            return Added.ROW
        count = shard.marks[place] >> shift & most
        if count < most:
            shard.marks[place] += 1 << shift
        return Added.COPY if count else Added.TIER

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
            shard.marks[place] = _DEAD
            shard.used -= 1
        return count == 1

    def __iter__(self) -> Iterator[int]:
        for shard in self._shards:
            for place, mark in enumerate(shard.marks):
                if mark & _LIVE:
                    yield shard.ids[place]
