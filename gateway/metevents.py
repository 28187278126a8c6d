"""Usual events of a stream: read in one typed decode, or known from one before. Pure.

Most workers send the same bytes with each token, but for the token. An event that was decoded once
is kept as what stands before and behind its text; what fills the gap is plain ASCII without quotes,
escapes and control characters, and all else is compared byte for byte. So such an event says what
the first one said, with another text, and whatever differs is decoded as before.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.wire.chunks import LINES


class Choice(msgspec.Struct):
    """As much of a choice as tells whether it carries content, and whether it ends."""

    index: int = 0
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """A usual chunk, without what asks for a closer look."""

    choices: list[Choice]
    usage: None = None
    error: None = None
    object: str | None = None

    def text(self, *, chat: bool) -> str | None:
        """What it says if it has one choice, which goes on; None: it is no such chunk."""
        if len(self.choices) != 1 or self.choices[0].finish_reason:
            return None
        [choice] = self.choices
        text = (choice.delta or {}).get("content") if chat else choice.text
        return text if isinstance(text, str) else None


_decode = msgspec.json.Decoder(Chunk).decode
_odd = re.compile(rb"[^ !#-\[\]-~]").search
"""What is not one and the same byte in JSON, in UTF-8 and in a line."""
_PROBE = b"a text in place of the one that came"
_MAX_BYTES = 4096
_FORMS = 64
"""Lengths of chunks that are remembered at most."""


def read_chunk(event: bytes) -> Chunk | None:
    """The chunk of an event with one line of data; None: it is no usual one."""
    try:
        return _decode(event[6:-2])
    except (msgspec.DecodeError, RecursionError):
        return None


class MetEvent:
    """An event as it may come again."""

    __slots__ = ("_before", "_behind", "_chunk_end", "_chunks", "_start", "_tail")

    def __init__(self, before: bytes, behind: bytes) -> None:
        self._before, self._behind = before, behind
        self._start, self._tail = len(before), len(behind)
        self._chunk_end = behind + b"\r\n"
        self._chunks: dict[int, tuple[bytes, int, int]] = {}
        """By the length of a whole chunk with it: what stands before the text, and where that
        begins and ends."""

    def again(self, data: bytes) -> bool:
        """``data`` is this event with some text that is not empty and in no way odd."""
        start, end = self._start, len(data) - self._tail
        return (
            start < end
            and data.startswith(self._before)
            and data.endswith(self._behind)
            and _odd(data, start, end) is None
        )

    def again_in_chunk(self, data: bytes) -> bool:
        """``data`` is one whole chunk of HTTP/1.1 in its shortest form, with this event as above
        in it."""
        form = self._chunks.get(len(data)) or self._form(len(data))
        if form is None:
            return False
        before, start, end = form
        return (
            data.startswith(before)
            and data.endswith(self._chunk_end)
            and _odd(data, start, end) is None
        )

    def _form(self, size: int) -> tuple[bytes, int, int] | None:
        """Of chunks of a length; None: there is none, or the text would be empty."""
        line = LINES.get(size)
        if line is None:
            return None
        before, end = line + self._before, size - len(self._chunk_end)
        if len(before) >= end:
            return None
        if len(self._chunks) >= _FORMS:
            self._chunks.clear()
        form = self._chunks[size] = before, len(before), end
        return form


def meet(event: bytes, chunk: Chunk, *, chat: bool) -> MetEvent | None:
    """What to keep of an event; None: it is not one to keep."""
    text = chunk.text(chat=chat)
    if not text or len(event) > _MAX_BYTES or not text.isascii():
        return None
    raw = b'"%b"' % text.encode()
    if _odd(raw, 1, len(raw) - 1) is not None or event.count(raw) != 1:
        return None
    at = event.index(raw) + 1
    before, behind = event[:at], event[at + len(text) :]
    # The same letters might stand for something else, and the text be written in another way.
    probe = read_chunk(before + _PROBE + behind)
    if probe is None or probe.text(chat=chat) != _PROBE.decode():
        return None
    return MetEvent(before, behind)
