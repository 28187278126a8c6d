"""Edits of a JSON object's bytes that leave every other byte as it was. Pure.

A request is never re-serialised: unknown fields, big integers, key order and white space survive.
This module finds *where* a top-level value lies. Strings are skipped from quote to quote, so that a
long prompt costs little; arrays and objects by the standard library's scanner, whose loop is C.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import BadRequest

_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^\s,\]}\"\[{:]+")
_NESTED = re.compile(rb'["\[\]{}]')
_decode_at = json.JSONDecoder(parse_int=float, strict=False).raw_decode
"""(value, end) of the value at a place of a text; numbers of any length are taken."""
MAX_MEMBERS = 10_000
"""Of an object whose members are looked at one by one; no engine knows a hundredth of them."""


class NotAnObject(ValueError):
    """The bytes are no JSON object. ``openai.parse`` refuses such a body before."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace ``raw[start:end]`` with ``text``."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Member:
    """One ``key: value`` of an object; ``raw[start:end]`` is the value."""

    key: str
    start: int
    end: int


def _skip(raw: bytes, at: int) -> int:
    """First position at or after ``at`` that is no white space."""
    found = _SPACE.match(raw, at)
    return found.end() if found else at


def _string_end(raw: bytes, at: int) -> int:
    """Position after the string that starts at ``at``; raises :class:`NotAnObject`."""
    quote = raw.find(b'"', at + 1) if raw[at : at + 1] == b'"' else -1
    while quote >= 0:
        if _backslashes(raw, at + 1, quote) % 2 == 0:
            return quote + 1
        quote = raw.find(b'"', quote + 1)
    raise NotAnObject(f"no JSON string at byte {at}")


def _backslashes(raw: bytes, start: int, end: int) -> int:
    """How many backslashes stand right before ``end``, looking back no further than ``start``."""
    window = 16
    while True:
        piece = raw[max(start, end - window) : end]
        run = len(piece) - len(piece.rstrip(b"\\"))
        if run < len(piece) or end - window <= start:
            return run
        window *= 8


class _Values:
    """Where the values of one body end."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._text = ""

    def end(self, at: int) -> int:
        """Position after the value that starts at ``at``."""
        first = self._raw[at : at + 1]
        if first == b'"':
            return _string_end(self._raw, at)
        if first in (b"{", b"["):
            return self._nested_end(at)
        found = _SCALAR.match(self._raw, at)
        if found is None:
            raise NotAnObject(f"no JSON value at byte {at}")
        return found.end()

    def _nested_end(self, at: int) -> int:
        """Position after the array or object that starts at ``at``."""
        # One character for each byte; what strings say does not matter here.
        self._text = self._text or self._raw.decode("latin-1")
        try:
            return _decode_at(self._text, at)[1]
        except (RecursionError, ValueError):
            return _counted_end(self._raw, at)


def _counted_end(raw: bytes, at: int) -> int:
    """The same by counting, for what is nested deeper than the scanner goes, or no JSON."""
    depth, position = 0, at
    while found := _NESTED.search(raw, position):
        position = found.end()
        mark = found.group()
        if mark == b'"':
            position = _string_end(raw, found.start())
        elif mark in b"[{":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return position
    raise NotAnObject(f"no JSON value at byte {at}")


def open_object(raw: bytes, at: int = 0) -> int:
    """Position right after the ``{`` of the object that starts at ``at`` (white space skipped)."""
    start = _skip(raw, at)
    if raw[start : start + 1] != b"{":
        raise NotAnObject(f"no JSON object at byte {start}")
    return start + 1


def members(raw: bytes, at: int = 0) -> Iterator[Member]:
    """Members of the object that starts at ``at``, in order, duplicates included.

    :raises BadRequest: there are more than :data:`MAX_MEMBERS`.
    """
    position = _skip(raw, open_object(raw, at))
    values, n_members = _Values(raw), 0
    while raw[position : position + 1] != b"}":
        n_members += 1
        if n_members > MAX_MEMBERS:
            raise BadRequest(f"The body has an object of more than {MAX_MEMBERS} members.")
        key_end = _string_end(raw, position)
        quoted = raw[position:key_end]
        key = str(json.loads(quoted)) if b"\\" in quoted else quoted[1:-1].decode()
        colon = _skip(raw, key_end)
        if raw[colon : colon + 1] != b":":
            raise NotAnObject(f"no colon at byte {colon}")
        start = _skip(raw, colon + 1)
        end = values.end(start)
        yield Member(key, start, end)
        position = _skip(raw, end)
        if raw[position : position + 1] == b",":
            position = _skip(raw, position + 1)
        elif raw[position : position + 1] != b"}":
            raise NotAnObject(f"no comma at byte {position}")


def set_member(raw: bytes, key: str, value: bytes, at: int = 0) -> list[Edit]:
    """Edits that give ``key`` of the object at ``at`` the JSON ``value``.

    Every duplicate is changed, so that the result does not depend on which one a reader takes. An
    absent key goes in front: the end of the object need not be looked for.
    """
    edits = [Edit(m.start, m.end, value) for m in members(raw, at) if m.key == key]
    return edits or [insert_first(raw, key, value, at)]


def insert_first(raw: bytes, key: str, value: bytes, at: int = 0) -> Edit:
    """The edit that puts ``key: value`` in front of the object at ``at``."""
    inside = open_object(raw, at)
    first = _skip(raw, inside)
    empty = raw[first : first + 1] == b"}"
    text = json.dumps(key).encode() + b":" + value + (b"" if empty else b",")
    return Edit(inside, inside, text)


def apply(raw: bytes, edits: list[Edit]) -> bytes:
    """``raw`` with non-overlapping edits made."""
    pieces: list[bytes] = []
    position = 0
    for edit in sorted(edits, key=lambda e: e.start):
        pieces += (raw[position : edit.start], edit.text)
        position = edit.end
    pieces.append(raw[position:])
    return b"".join(pieces)
