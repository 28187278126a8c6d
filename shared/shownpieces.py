"""Tokens of long pieces of text that processes of one machine show each other, in shared memory.

    area of process 0 | area of process 1 | ...      each written by its own process alone

    area      slots u64 x SLOTS: where the last record is whose name ends there
              records, written round and round
    record    name 16 bytes | check u64 | size u32 | tokens

There are no locks between processes. A reader copies a record and believes it if name and check are
right, which they are not while it is being overwritten. A name is a keyed hash of tokenizer, salt
and text, so nobody who sends texts can make two of one name; the texts themselves are not kept.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from hashlib import blake2b
from struct import Struct

import xxhash

SLOTS = 4096
LONG_ENOUGH = 256
"""Characters from which encoding a piece takes longer than looking for it."""
_SLOT_BYTES = 8 * SLOTS
LEAST_AREA = 2 * _SLOT_BYTES
"""Bytes."""
_HEAD = Struct("<16sQI")
_LARGEST_SHARE = 4
"""A record takes at most this part of an area."""


def make_area_file(areas: int, area_bytes: int) -> int:
    """File descriptor of memory for so many processes (Linux); pages are taken as they are used."""
    if sys.platform != "linux":
        raise OSError("needs Linux")
    fd = os.memfd_create("headwater-pieces")
    os.ftruncate(fd, areas * area_bytes)
    return fd


class ShownPieces:
    """One process's view of all areas.

    :param number: of this process: the area that it writes.
    :param secret: for the names, at most 64 bytes; the same in all processes.
    """

    def __init__(self, fd: int, number: int, areas: int, secret: bytes) -> None:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self._bytes = memoryview(memory)
        self._area_bytes = len(memory) // areas
        if self._area_bytes % 8 or self._area_bytes <= _SLOT_BYTES:
            raise ValueError(f"areas of {self._area_bytes} bytes")
        self._starts = [n * self._area_bytes for n in range(areas)]
        self._slots = [self._bytes[at : at + _SLOT_BYTES].cast("Q") for at in self._starts]
        self._number, self._secret = number, secret
        self._next = _SLOT_BYTES
        """Where the next record goes, in our area."""
        self._lock = threading.Lock()

    def name(self, tokenizer: str, text: str, salt: str = "") -> bytes:
        """Under which a piece's tokens are found, by requests of that salt. Pure."""
        told = f"{len(tokenizer)} {len(salt)} {tokenizer}{salt}{text}".encode(
            "utf-8", "surrogatepass"
        )
        return blake2b(told, digest_size=16, key=self._secret).digest()

    def find(self, name: bytes) -> bytes | None:
        """Packed tokens, whoever wrote them; None: nobody did, or they are gone."""
        slot = _slot(name)
        for start, slots in zip(self._starts, self._slots, strict=True):
            at = slots[slot]
            if at and (tokens := self._read(start, at, name)) is not None:
                return tokens
        return None

    def add(self, name: bytes, tokens: bytes) -> None:
        """Show tokens to the others; they may be overwritten by later ones at any time."""
        size = _HEAD.size + len(tokens)
        if size > self._area_bytes // _LARGEST_SHARE:
            return
        record = _HEAD.pack(name, _check(name, tokens), len(tokens)) + tokens
        with self._lock:
            at = self._next
            if at + size > self._area_bytes:
                at = _SLOT_BYTES
            self._next = at + size
            start = self._starts[self._number]
            self._bytes[start + at : start + at + size] = record
            self._slots[self._number][_slot(name)] = at

    def _read(self, start: int, at: int, name: bytes) -> bytes | None:
        room = self._area_bytes - at - _HEAD.size
        if room < 0:
            return None
        found, check, size = _HEAD.unpack_from(self._bytes, start + at)
        if found != name or size > room:
            return None
        begin = start + at + _HEAD.size
        tokens = bytes(self._bytes[begin : begin + size])
        return tokens if _check(name, tokens) == check else None


def _slot(name: bytes) -> int:
    return int.from_bytes(name[-8:], "little") % SLOTS


def _check(name: bytes, tokens: bytes) -> int:
    return xxhash.xxh3_64_intdigest(tokens, seed=int.from_bytes(name[:8], "little"))
