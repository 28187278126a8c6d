"""Which files a report reads, from when on, and what is wrong with a line that cannot be read."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gateway.ledgerline import Dropped, decode_record
from gateway.packed import BrokenOff, lines_of
from gateway.records import RequestRecord
from shared.errors import ConfigError

PARQUET = ".parquet"
SUFFIXES = (".jsonl", ".jsonl.gz", PARQUET)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_since(text: str, now: float) -> float:
    """``30m``, ``1h``, ``2d`` before ``now``, or an ISO time (UTC unless it names a zone).

    :returns: seconds since the epoch.
    :raises ConfigError: it is neither.
    """
    span = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if span:
        return now - float(span[1]) * _SECONDS[span[2]]
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        reason = "is no duration (30m, 1h, 2d) and no ISO time (2026-07-28T10:00)"
        raise ConfigError("--since", text, reason) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def resolve(paths: Sequence[str | Path]) -> list[Path]:
    """The ledger files that files, folders and glob patterns stand for; each file once.

    :raises ConfigError: a path does not exist, matches nothing or cannot be read.
    """
    found: dict[Path, Path] = {}
    for given in paths:
        for file in _expand(Path(given).expanduser()):
            found.setdefault(file.resolve(), file)
    for file in found.values():
        _check_readable(file)
    return list(found.values())


def _expand(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            return sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if path.exists():
            return [path]
        if glob.has_magic(str(path)):
            matches = sorted(glob.glob(str(path), recursive=True))
            if matches:
                return [file for match in matches for file in _expand(Path(match))]
    except OSError as error:
        raise ConfigError("ledger", str(path), f"cannot be read: {error.strerror}") from error
    raise ConfigError("ledger", str(path), "no such file or folder")


def _check_readable(file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise ConfigError("ledger", str(file), f"cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that holds no record."""

    file: Path
    number: int
    """From 1."""
    torn: bool
    """Not even JSON: cut off by a crash, still being written, or where a packed file ends."""
    reason: str


def scan(file: Path) -> Iterator[tuple[int, RequestRecord | Dropped | BadLine]]:
    """Every line that is not blank, with its number, decoded one by one: exact, but not fast.

    Where a packed file breaks off is a torn line.

    :raises ConfigError: the file cannot be read.
    """
    if file.suffix == PARQUET:
        from gateway.report.parquet import rows

        yield from enumerate(rows(file), 1)
        return
    number = 0
    try:
        for number, line in enumerate(lines_of(file), 1):
            if line.strip():
                yield number, _decode(file, number, line)
    except BrokenOff as error:
        yield number + 1, BadLine(file, number + 1, True, str(error))
    except OSError as error:
        raise ConfigError("ledger", str(file), f"cannot be read: {error}") from error


def read_ledger(paths: Sequence[str | Path]) -> Iterator[RequestRecord]:
    """All records of ledgers (files, also ``.gz`` and ``.parquet``, folders, patterns), in order.

    Torn lines and notes of lost records are passed over; ``scan`` tells of them.

    :raises ConfigError: a path is wrong, or a line is JSON but no record.
    """
    for file in resolve(paths):
        for number, read in scan(file):
            if isinstance(read, RequestRecord):
                yield read
            elif isinstance(read, BadLine) and not read.torn:
                raise ConfigError("ledger", f"{file}:{number}", f"no record: {read.reason}")


def _decode(file: Path, number: int, line: bytes) -> RequestRecord | Dropped | BadLine:
    try:
        return decode_record(line)
    except msgspec.ValidationError as error:
        return BadLine(file, number, False, str(error))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return BadLine(file, number, True, str(error))
