"""Server-sent events: an incremental parser and an encoder. Pure.

Rules: any chunking of the same bytes gives the same events; the ``raw`` bytes of all events joined
are the bytes fed. A carriage return at the very end of a chunk may be half of CR LF, so an event
that ends in it waits for the next byte. State: the unfinished bytes and whether the stream's first
event is still to come.
"""

from __future__ import annotations

import re

import msgspec

from shared.errors import HeadwaterError

MAX_EVENT_BYTES = 16 * 2**20
_BOM = b"\xef\xbb\xbf"
# A lone CR counts only when the byte after it is known not to be LF.
_EOL = rb"(?:\r\n|\n|\r(?=[^\n]))"
_FIRST_BLANK = re.compile(_EOL)
_BLANK = re.compile(_EOL + _EOL)
_LINE_END = re.compile(rb"\r\n|\n|\r")
# How far a blank line can begin before bytes not seen yet: CR LF CR.
_OVERLAP = 3


class SseEventTooLarge(HeadwaterError):
    """One event is beyond the size cap; the parser is of no use after that."""


class SseEvent(msgspec.Struct, frozen=True):
    """One event, or a run of comments, as it stood in the stream."""

    data: str | None
    """The data lines joined with LF; None without any data line, ``""`` for an empty one."""
    raw: bytes
    """The exact bytes, terminator included."""
    event: str | None = None
    id: str | None = None
    retry: int | None = None
    """Milliseconds."""
    complete: bool = True
    """False only for what :meth:`SseParser.finish` found without its blank line."""

    @property
    def comment_only(self) -> bool:
        """Neither data nor any other field: comments, unknown fields or blank lines."""
        return self.data is None and self.event is None and self.id is None and self.retry is None


class SseParser:
    """Bytes in, events out."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._buffer = bytearray()
        self._scanned = 0
        self._at_start = True
        self._too_large = False

    @property
    def pending(self) -> bool:
        """The next bytes are no event's beginning: one is unfinished, or none has come yet."""
        return bool(self._buffer) or self._at_start or self._too_large

    def feed(self, data: bytes) -> list[SseEvent]:
        """Events completed by ``data``.

        Raises :class:`SseEventTooLarge` once all events before the oversized one have been
        returned.
        """
        self._refuse_if_too_large()
        if self._buffer:
            self._buffer += data
            buffer: bytes | bytearray = self._buffer
        else:  # the usual case: whole events in each chunk, nothing to join
            buffer = data
        events: list[SseEvent] = []
        start, scan = 0, self._scanned
        while not self._too_large and (end := _event_end(buffer, start, scan)):
            self._take(bytes(buffer[start:end]), events)
            start = scan = end
        if buffer is self._buffer:
            del self._buffer[:start]
        else:
            self._buffer = bytearray(buffer[start:])
        self._scanned = max(0, len(self._buffer) - _OVERLAP)
        if len(self._buffer) > self._max:
            self._too_large = True
        if not events:
            self._refuse_if_too_large()
        return events

    def finish(self) -> list[SseEvent]:
        """What is left at the end of the stream: at most one event, ``complete`` if it has its
        blank line (a final CR then needs no look-ahead)."""
        self._refuse_if_too_large()
        rest = bytes(self._buffer)
        self._buffer, self._scanned = bytearray(), 0
        if not rest:
            return []
        waited = rest.endswith(b"\r") and (len(rest) == 1 or rest[-2] in b"\r\n")
        return [self._event(rest, complete=waited)]

    def _take(self, raw: bytes, events: list[SseEvent]) -> None:
        if len(raw) > self._max:
            self._too_large = True
        else:
            events.append(self._event(raw, complete=True))

    def _refuse_if_too_large(self) -> None:
        if self._too_large:
            raise SseEventTooLarge(f"an event is longer than {self._max} bytes")

    def _event(self, raw: bytes, *, complete: bool) -> SseEvent:
        text = raw
        if self._at_start:
            self._at_start = False
            text = raw.removeprefix(_BOM)
        usual = text.startswith(b"data: ") and text.endswith(b"\n\n") and text.count(b"\n") == 2
        if usual and b"\r" not in text:  # the form all engines send
            return SseEvent(text[6:-2].decode("utf-8", "replace"), raw)
        return _parse_lines(text, raw, complete=complete)


def _event_end(buffer: bytes | bytearray, start: int, scan: int) -> int:
    """Position after the blank line that ends the event at ``start``; 0 = not there yet."""
    leading = _FIRST_BLANK.match(buffer, start)
    found = leading or _BLANK.search(buffer, max(start, scan))
    return found.end() if found else 0


def _parse_lines(text: bytes, raw: bytes, *, complete: bool) -> SseEvent:
    data: list[str] = []
    event: str | None = None
    ident: str | None = None
    retry: int | None = None
    for line in _LINE_END.split(text):
        field, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            event = value
        elif field == "id" and "\0" not in value:
            ident = value
        elif field == "retry" and value.isascii() and value.isdigit():
            retry = int(value)
    return SseEvent("\n".join(data) if data else None, raw, event, ident, retry, complete)


def encode(data: bytes | str) -> bytes:
    """One event with ``data``; line ends inside become several data lines."""
    payload = data.encode() if isinstance(data, str) else data
    if b"\n" not in payload and b"\r" not in payload:
        return b"data: " + payload + b"\n\n"
    return b"".join(b"data: " + line + b"\n" for line in _LINE_END.split(payload)) + b"\n"


DONE = encode(b"[DONE]")
"""The end marker of OpenAI streams."""
