"""Files of lines, plain or packed by gzip. One that breaks off gives the lines that are whole.

A packed file is cut where a disk was full, a copy was interrupted or its packer was ended: of all
that lies before the cut nothing is lost.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

BREAKS_OFF = "the packed file breaks off here"
"""How the message of :class:`BrokenOff` begins."""
_MAGIC = b"\x1f\x8b"


class BrokenOff(OSError):
    """A packed file ends, or is spoilt, in the middle; its whole lines have been given."""


def lines_of(path: Path, *, packed: bool | None = None) -> Iterator[bytes]:
    """The lines of a file, with their ends.

    :param packed: whether it is; None: if its name ends in ``.gz``.
    :raises BrokenOff: behind the last line that is whole.
    :raises OSError: it cannot be read, or is called ``.gz`` and is none.
    """
    if not (path.suffix == ".gz" if packed is None else packed):
        with path.open("rb") as lines:
            yield from lines
        return
    with path.open("rb") as raw:
        first = raw.read(len(_MAGIC))
        if not _MAGIC.startswith(first):
            raise OSError("is no gzip file")
        raw.seek(0)
        try:
            with gzip.open(raw) as lines:
                yield from lines
            if first:
                return
            error: Exception = EOFError("it is empty")
        except (EOFError, zlib.error, gzip.BadGzipFile) as broken:
            error = broken
    raise BrokenOff(f"{BREAKS_OFF}: {error}") from error


def is_packed(path: Path) -> bool:
    """Whether a file begins as gzip does, whatever its name.

    :raises OSError: it cannot be read.
    """
    with path.open("rb") as raw:
        return raw.read(len(_MAGIC)) == _MAGIC


def mended(paths: Iterable[Path], folder: Path) -> dict[Path, Path]:
    """For each packed file that breaks off a plain file in ``folder`` with its whole lines.

    :raises OSError: a file cannot be read.
    """
    made: dict[Path, Path] = {}
    for path in paths:
        if path.suffix == ".gz" and _breaks_off(path):
            plain = folder / f"mended-{len(made)}.jsonl"
            with plain.open("wb") as whole:
                try:
                    whole.writelines(lines_of(path))
                except BrokenOff:
                    made[path] = plain
    return made


def _breaks_off(path: Path) -> bool:
    try:
        for _ in lines_of(path):
            pass
    except BrokenOff:
        return True
    return False
