"""Heads of requests and answers as bytes and back. Pure.

Names and values cross as they came: UTF-8, with what is none kept as it is (surrogate escapes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ILLEGAL = re.compile(r"[\r\n\0]")
_IN_START = re.compile(r"[A-Z]+ [!-~\x80-\U0010ffff]+ HTTP/1\.1|HTTP/1\.1 [0-9]{3} [ -~]*")


class BadHead(ValueError):
    """A line break or a zero byte where none may be: whoever sent it wanted a second head."""


def encoded(start: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Start line and headers with the empty line behind them. Raises :class:`BadHead`."""
    if not _IN_START.fullmatch(start):
        raise BadHead(start[:100])
    lines = [start]
    lines.extend([f"{name}: {value}" for name, value in headers])
    text = "\r\n".join(lines)
    # Each line adds one CR LF; any more of them, and any zero byte, came from inside a line.
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or "\0" in text:
        raise BadHead(next(line for line in lines if _ILLEGAL.search(line))[:100])
    return f"{text}\r\n\r\n".encode("utf-8", "surrogateescape")


def decoded(pairs: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Parsed headers as text."""
    return [
        (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
        for name, value in pairs
    ]
