"""An open hash table of 12 bytes a cell: u64 key -> u32 value, whole arrays of keys at a time.

    bucket = 8 cells, filled from the left; a full one overflows into the next
    value    0: never used      1: deleted (its key may come back to it)      2..: the caller's

A cell never becomes 0 again, so a full bucket is one whose last cell is not 0, and a search ends
at the first bucket that is not full. Deleted cells go when the table is rebuilt, which its owner
does (``gateway.index.cellstore``): this table never grows.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]

WIDTH = 8
_LARGE = 1 << 22
"""Bytes from which numpy asks for large pages."""
_FEW = 8
"""So many keys are put one by one."""
DELETED = 1
_MIX = 0x9E3779B97F4A7C15
_ALL = (1 << 64) - 1
ZERO_STANDS_FOR = _ALL
"""An unused cell has key 0, so a key of 0 is kept under this one."""
_HALF = np.uint64(32)
_NP_MIX = np.uint64(_MIX)


def as_keys(keys: Sequence[int] | npt.NDArray[Any]) -> Keys:
    """Keys as they are stored."""
    made = np.array(keys, dtype=np.uint64)
    made[made == 0] = ZERO_STANDS_FOR
    return made


def as_key(key: int) -> int:
    """One key as it is stored."""
    return key or ZERO_STANDS_FOR


def _zeros(size: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Zeros in small pages, where they are many: the first keys go all over the table, and of large
    pages, for which numpy asks, they would have the whole of it cleared at once."""
    room = size * kind.itemsize
    if room < _LARGE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(size, dtype=kind)
    pages = mmap.mmap(-1, room)
    with suppress(OSError):  # a system that has none
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype=kind)


class Cells:
    """A table for about ``cells`` * 0.7 keys."""

    def __init__(self, cells: int) -> None:
        self.buckets = max(2, -(-cells // WIDTH))
        self.size = self.buckets * WIDTH
        self.keys: Keys = _zeros(self.size, np.dtype(np.uint64))
        self.values: Values = _zeros(self.size, np.dtype(np.uint32))
        self.used = 0
        """Cells that are not 0."""
        # Single cells are read through these: an eighth of the time of an array's own access.
        self._key_at = self.keys.data
        self._value_at = self.values.data

    # -------------------------------------------------------------- one key

    def _bucket(self, key: int) -> int:
        return ((key * _MIX & _ALL) >> 32) * self.buckets >> 32

    def find(self, key: int) -> int | None:
        """Cell of a key (as stored); it may be deleted."""
        key_at, bucket = self._key_at, self._bucket(key)
        while True:
            start = bucket * WIDTH
            row = key_at[start : start + WIDTH].tolist()
            if key in row:
                return start + row.index(key)
            if not self._value_at[start + WIDTH - 1]:
                return None
            bucket = (bucket + 1) % self.buckets

    def value(self, at: int) -> int:
        """What is in a cell."""
        return self._value_at[at]

    def key(self, at: int) -> int:
        """Whose cell it is."""
        return self._key_at[at]

    def set(self, at: int, value: int) -> None:
        """Put another value into a cell that is used."""
        self._value_at[at] = value

    def put(self, key: int, value: int) -> None:
        """A key that is not there."""
        value_at, bucket = self._value_at, self._bucket(key)
        while True:
            start = bucket * WIDTH
            if not value_at[start + WIDTH - 1]:
                break
            bucket = (bucket + 1) % self.buckets
        at = start + value_at[start : start + WIDTH].tolist().index(0)
        self._key_at[at], value_at[at] = key, value
        self.used += 1

    # -------------------------------------------------------------- many keys

    def _homes(self, keys: Keys) -> Places:
        mixed = (keys * _NP_MIX) >> _HALF
        return ((mixed * np.uint64(self.buckets)) >> _HALF).astype(np.int64)

    def find_all(self, keys: Keys) -> Places:
        """Cells of keys, -1 for those that are not there."""
        rows = self.keys.reshape(-1, WIDTH)
        at = np.full(keys.size, -1, dtype=np.int64)
        left, wanted, bucket = np.arange(keys.size), keys, self._homes(keys)
        while left.size:
            start = bucket * WIDTH
            found = start + (rows[bucket] == wanted[:, None]).argmax(axis=1)
            hit = self.keys[found] == wanted
            at[left[hit]] = found[hit]
            # Few go on: those whose bucket is full and does not hold them.
            on = np.flatnonzero(~hit & (self.values[start + WIDTH - 1] != 0))
            left, wanted, bucket = left[on], wanted[on], (bucket[on] + 1) % self.buckets
        return at

    def put_all(self, keys: Keys, values: Values) -> None:
        """Keys that are not there, each once."""
        bucket = self._homes(keys)
        while keys.size > _FEW:
            order = np.argsort(bucket, kind="stable")
            bucket, keys, values = bucket[order], keys[order], values[order]
            first = np.searchsorted(bucket, bucket, side="left")
            taken = (self.values.reshape(-1, WIDTH)[bucket] != 0).sum(axis=1)
            column = taken + (np.arange(bucket.size) - first)
            fits = column < WIDTH
            at = bucket[fits] * WIDTH + column[fits]
            self.keys[at], self.values[at] = keys[fits], values[fits]
            self.used += int(at.size)
            # What finds its bucket full overflows into the next.
            keys, values = keys[~fits], values[~fits]
            bucket = (bucket[~fits] + 1) % self.buckets
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            self.put(key, value)
