"""Heads of requests and answers as bytes and back. Pure.

Names and values cross as they came: UTF-8, with what is none kept as it is (surrogate escapes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_IN_START = re.compile(r"[A-Z]+ [!-~\x80-\U0010ffff]+ HTTP/1\.1|HTTP/1\.1 [0-9]{3} [ -~]*")
_MAX_STARTS = 1024
_SHORT_START = 200
_starts: dict[tuple[str, str], bytes] = {}
"""Start lines that were found to be good, with their hosts, as bytes."""


_line = ": ".join


class BadHead(ValueError):
    """A line break or a zero byte where none may be: whoever sent it wanted a second head."""


class Sealed(list[tuple[str, str]]):
    """Headers that are met again and again: the first of them are bytes already. Made by
    :func:`sealed` and :func:`plus`."""

    __slots__ = ("done", "wire")

    done: int
    wire: bytes
    """The lines of the first ``done`` of them."""


def sealed(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers as bytes too; as they are if they cannot be, which :func:`encoded` tells."""
    try:
        wire = _lines(headers)
    except BadHead:
        return headers
    made = Sealed(headers)
    made.done, made.wire = len(headers), wire
    return made


def plus(headers: list[tuple[str, str]], *more: tuple[str, str]) -> list[tuple[str, str]]:
    """The headers with some more behind them."""
    if type(headers) is Sealed:
        made = Sealed(headers)
        made.done, made.wire = headers.done, headers.wire
        made += more
        return made
    return [*headers, *more]


def encoded(
    start: str,
    headers: Iterable[tuple[str, str]],
    own: bytes = b"",
    host: str = "",
) -> bytes:
    """Start line and headers with the empty line behind them. Raises :class:`BadHead`.

    :param own: lines of our own that follow, each with its end; not looked at.
    :param host: of a request; stands first.
    """
    first = _starts.get((start, host)) or _checked(start, host)
    if type(headers) is Sealed:
        more = headers[headers.done :]
        return b"%b%b%b%b\r\n" % (first, headers.wire, _lines(more) if more else b"", own)
    return b"%b%b%b\r\n" % (first, _lines([*headers]), own)


def _checked(start: str, host: str) -> bytes:
    if not _IN_START.fullmatch(start):
        raise BadHead(start[:100])
    line = f"{start}\r\n".encode("utf-8", "surrogateescape")
    if host:
        line += _lines([("Host", host)])
    if len(start) <= _SHORT_START:
        if len(_starts) >= _MAX_STARTS:
            _starts.clear()
        _starts[start, host] = line
    return line


def _lines(headers: list[tuple[str, str]]) -> bytes:
    size = len(headers)
    # The same as a loop that writes line after line, but done in C.
    text = "\r\n".join([*map(_line, headers), ""])
    # Each line adds one CR LF; any more of them, and any zero byte, came from inside a line.
    if text.count("\n") != size or text.count("\r") != size or "\0" in text:
        raise BadHead("a line break or a zero byte in a header")
    return text.encode("utf-8", "surrogateescape")


def decoded(pairs: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Parsed headers as text."""
    return [
        (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
        for name, value in pairs
    ]
