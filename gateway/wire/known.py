"""Heads that have been met before on a connection. Pure.

Most clients say the same in each request but for the body's length, and most workers in each answer
but for that and the date. A head that llhttp has understood once is kept as bytes with gaps for
these; what fills the gaps is checked here, and all else is compared byte for byte. So nothing
passes that the parser would not have passed, and whatever differs goes to the parser as before.
"""

from __future__ import annotations

import re
from typing import Generic, TypeVar

T = TypeVar("T")

_GAP = re.compile(
    rb"\r\n(?:(content-length):[ \t]*([0-9]{1,9})|date:[ \t]*([^\r\n]{29}))(?=\r\n)", re.IGNORECASE
)
_DATE = re.compile(rb"[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9:]{8} GMT")
_DATE_BYTES = 29
_ANY_DATE = b"Thu, 01 Jan 1970 00:00:00 GMT"
_DIGITS = 10
"""One more than a length may have."""
_MAX_BYTES = 4096
_END = b"\r\n\r\n"


class KnownHead(Generic[T]):
    """One such head, and what was made of it."""

    __slots__ = ("_date", "_first", "_rest", "length", "meaning", "size")

    def __init__(self, pieces: list[bytes], dates: list[bool], meaning: T) -> None:
        """``dates``: for the gap behind each piece but the last, whether it is that of a date."""
        self._first = pieces[0]
        self._rest = [
            (is_date, piece, len(piece)) for is_date, piece in zip(dates, pieces[1:], strict=True)
        ]
        self.size = len(pieces[0])
        self.meaning = meaning
        self._date = _ANY_DATE
        """The date that was found last: for a second it is the same."""
        self.length = 0
        """Of the body behind the head that :meth:`end_in` found last."""

    def end_in(self, data: bytes) -> int:
        """Where the body begins if ``data`` begins with this head; 0: it does not."""
        if not data.startswith(self._first):
            return 0
        at = self.size
        for is_date, piece, size in self._rest:
            if is_date:
                end = at + _DATE_BYTES
                if not data.startswith(self._date, at):
                    if _DATE.fullmatch(data, at, end) is None:
                        return 0
                    self._date = data[at:end]
            else:
                end = data.find(b"\r", at, at + _DIGITS)
                if end < 0 or not (digits := data[at:end]).isdigit():
                    return 0
                self.length = int(digits)
            if not data.startswith(piece, end):
                return 0
            at = end + size
        return at


def parted(data: bytes, size: int) -> tuple[bytes, bytes]:
    """The first ``size`` bytes of ``data``, or all there are, and what lies behind them."""
    return (data, b"") if len(data) <= size else (data[:size], data[size:])


def learn(
    data: bytes, start: bytes, headers: int, meaning: T, *, dated: bool = False
) -> KnownHead[T] | None:
    """The head at the beginning of ``data``, which the parser has just read; None: not one to keep.

    :param start: how its first line has to begin.
    :param headers: how many headers the parser found.
    :param dated: a date may differ too: nobody reads it.
    """
    end = data.find(_END, 0, _MAX_BYTES)
    if end < 0 or not data.startswith(start):
        return None
    head = data[: end + len(_END)]
    # One line for each header: no line end that the parser and this could see differently.
    if not head.count(b"\n") == head.count(b"\r") == head.count(b"\r\n") == headers + 2:
        return None
    gaps = [gap for gap in _GAP.finditer(head) if gap.group(1) is not None or dated]
    lengths = sum(gap.group(1) is not None for gap in gaps)
    if lengths != 1 or len(gaps) > 2 or head.lower().count(b"\r\ncontent-length") != 1:
        return None
    pieces, dates, at = [], [], 0
    for gap in gaps:
        is_date = gap.group(1) is None
        begin, stop = gap.span(3 if is_date else 2)
        if is_date and _DATE.fullmatch(head, begin, stop) is None:
            return None
        pieces.append(head[at:begin])
        dates.append(is_date)
        at = stop
    return KnownHead([*pieces, head[at:]], dates, meaning)
