"""Trace files: plain or gzip, the block size in the name (``chats.b64.jsonl.gz``) or given."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

from gateway.sim.trace import Trace, TraceError, read_trace

_BLOCK_SIZE = re.compile(r"\.b([1-9]\d{0,6})\.")


def block_size_of(path: Path) -> int | None:
    """Tokens per block as the file's name says; None: it does not."""
    found = _BLOCK_SIZE.search(path.name)
    return int(found[1]) if found else None


def load_trace(path: Path, block_size: int, limit: int = 0) -> Trace:
    """Read a trace; ``limit``: only so many requests, 0 = all.

    :raises TraceError: it cannot be read or is no trace.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            return read_trace(gzip.open(raw) if packed else raw, block_size, limit)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot be read: {reason}") from error
