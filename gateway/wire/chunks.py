"""Chunks of HTTP/1.1 in their shortest form. Pure."""

from __future__ import annotations

_LONGEST = 2048

LINES = {
    len(line) + size + 2: line for size in range(1, _LONGEST + 1) for line in (b"%x\r\n" % size,)
}
"""The line before the content of a chunk, by the length of the whole chunk: it is another one for
each size of contents. Long chunks are left out."""


def content_of(chunk: bytes) -> bytes:
    """What is in a whole chunk."""
    return chunk[chunk.index(b"\r\n") + 2 : -2]
