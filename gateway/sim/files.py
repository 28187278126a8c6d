"""Trace files: those of others, plain or gzip, and the gateway's own (a file, or its folder).

Of others the block size stands in the name (``chats.b64.jsonl.gz``) or is given.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import IO

import msgspec

from gateway.sim.recorded import recorded_trace
from gateway.sim.trace import Trace, TraceError, read_trace
from gateway.tracefile import TraceFileError, TraceLine, read_traced, trace_files
from shared.blocks import GRANULE

_BLOCK_SIZE = re.compile(r"\.b([1-9]\d{0,6})\.")

OnBad = Callable[[Path, int, str], None]
"""Told the file, line number and reason of a line that cannot be read."""


def block_size_of(path: Path) -> int | None:
    """Tokens per block as the file's name says; None: it does not."""
    found = _BLOCK_SIZE.search(path.name)
    if found:
        return int(found[1])
    return GRANULE if is_recorded(path) else None


def is_recorded(path: Path) -> bool:
    """Whether it is a folder or a file of the gateway's own traces."""
    if path.is_dir():
        return True
    try:
        with _open(path) as lines:
            first = next((line for line in islice(lines, 8) if line.strip()), b"")
        msgspec.json.decode(first, type=TraceLine)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True


def load_trace(
    path: Path,
    block_size: int,
    limit: int = 0,
    model: str = "",
    on_bad: OnBad = lambda path, line, why: None,
) -> Trace:
    """Read a trace; ``limit``: only so many requests, 0 = all.

    :param model: of the gateway's own traces, which may hold several.
    :raises TraceError: it cannot be read or is no trace.
    """
    try:
        if is_recorded(path):
            requests = read_traced(trace_files(path), on_bad)
            return recorded_trace(requests, block_size, limit, model)
        with _open(path) as lines:
            return read_trace(lines, block_size, limit)
    except TraceFileError as error:
        raise TraceError(str(error)) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot be read: {reason}") from error


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else path.open("rb")
