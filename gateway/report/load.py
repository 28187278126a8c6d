"""Ledger files into one table of a database that lives in a temporary file, each record checked.

Table ``attempts``: one row per attempt with what a report needs of it, the token terms as
``t_prompt`` ... ``t_gained``, and ``depth``: how much of what could match was
delivered (``none partial full``, ``unknown`` where the engine told nothing). View ``finals``: the
final attempts, one per request. In a file the columns are compressed: a tenth of their size in
memory, and no slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb

from gateway.ledgerline import Dropped
from gateway.packed import BREAKS_OFF, mended
from gateway.records import RequestRecord, TokenFlow
from gateway.report.columns import COLUMNS, TERMS, rows_of
from gateway.report.sources import BadLine, resolve, scan
from shared.errors import ConfigError, HeadwaterError

NAMED_LINES = 5
"""How many unreadable lines are named; all are counted."""

MEMORY = "384MB"
"""Of the database; the process has some 150 MB beside."""
_DEPTH = """CASE WHEN NOT reported OR t_prompt = 0 THEN 'unknown'
                    WHEN t_delivered = 0 THEN 'none'
                    WHEN t_delivered >= t_prompt - t_tail THEN 'full'
                    ELSE 'partial' END"""
_LEFT_OUT = ("id", "client_id", "route", "out", "decided_s", "total_s", "prompt", "matched",
             "term", "other", "other_matched", "gap")  # fmt: skip
"""Columns that no sum needs."""


class LedgerError(HeadwaterError):
    """A ledger that cannot be reported on honestly: a record is no record or does not close."""


class EmptyLedger(HeadwaterError):
    """There is nothing to report."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The open database and what was learned while it was filled."""

    db: duckdb.DuckDBPyConnection
    files: tuple[Path, ...]
    since: float | None
    records: int
    skipped: int
    """Lines that hold no JSON: cut off by a crash, or being written at this moment."""
    skipped_named: tuple[BadLine, ...]
    """The first of them, those where packed files break off before the others."""
    dropped: int
    """Records that gateways had to drop, as told by the ledger."""


def ledgers(paths: Sequence[str | Path]) -> list[Path]:
    """As :func:`gateway.report.sources.resolve`.

    :raises EmptyLedger: there is no file, which the message says of which places.
    """
    files = resolve(paths)
    if not files:
        where = ", ".join(map(str, paths))
        raise EmptyLedger(f"no ledger files in {where}: no request has been recorded there yet")
    return files


@contextmanager
def load(files: Sequence[Path], since: float | None, memory: str = MEMORY) -> Iterator[Loaded]:
    """Read all files; the database lives until the context ends.

    :param since: seconds since the epoch; earlier records are left out.
    :param memory: what the database may use; the table itself lies in a temporary folder.
    :raises LedgerError: a line is JSON but no record, or a record's sums do not close.
    :raises EmptyLedger: no record in that time.
    :raises ConfigError: a file cannot be read.
    """
    with TemporaryDirectory(prefix="headwater-report-") as spill:
        settings: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": memory,
            "temp_directory": spill,
            "preserve_insertion_order": False,
        }
        with duckdb.connect(str(Path(spill) / "attempts.duckdb"), config=settings) as db:
            db.execute("SET enable_progress_bar = false")  # it would go to standard output
            named, mends = _fill(db, files, since, Path(spill))
            skipped = _count(db, "SELECT count(*) FROM attempts WHERE arrived IS NULL")
            dropped = _count(db, "SELECT coalesce(sum(dropped), 0) FROM attempts")
            if skipped or dropped:
                db.execute("DELETE FROM attempts WHERE arrived IS NULL OR dropped IS NOT NULL")
            db.execute("CREATE VIEW finals AS SELECT * FROM attempts WHERE final")
            records = _count(db, "SELECT count(*) FROM attempts")
            loaded = Loaded(
                db=db,
                files=tuple(files),
                since=since,
                records=records,
                skipped=max(skipped, len(named)),
                skipped_named=named[:NAMED_LINES],
                dropped=dropped,
            )
            if not records:
                raise EmptyLedger(_why_empty(loaded))
            _refuse_unclosed(db, since, {plain: file for file, plain in mends.items()})
            yield loaded


def _count(db: duckdb.DuckDBPyConnection, sql: str) -> int:
    row = db.execute(sql).fetchone()
    return int(row[0]) if row else 0


def _why_empty(loaded: Loaded) -> str:
    if loaded.skipped_named:
        first = loaded.skipped_named[0]
        return f"no records: {loaded.skipped} unreadable lines, first {first.file}:{first.number}"
    files = loaded.files
    where = str(files[0]) if len(files) == 1 else f"{len(files)} files"
    return f"no records in {where}" + ("" if loaded.since is None else " in that time")


def _fill(
    db: duckdb.DuckDBPyConnection, files: Sequence[Path], since: float | None, spill: Path
) -> tuple[tuple[BadLine, ...], dict[Path, Path]]:
    """Create ``attempts``. The strict reader is fast; only when it objects are lines looked at.

    :returns: what cannot be read, and what was read in place of which packed file.
    """
    mends: dict[Path, Path] = {}
    try:
        _create(db, files, since, strict=True)
        if not _count(db, "SELECT count(*) FROM attempts WHERE broken"):
            return (), mends
    except duckdb.InvalidInputException:
        pass  # what is wrong is found below, line by line
    except duckdb.IOException as error:
        mends = mend(files, spill, error)
    bad = tuple(sorted(_torn_lines(files), key=lambda line: BREAKS_OFF not in line.reason))
    try:
        _create(db, [mends.get(file, file) for file in files], since, strict=False)
    except duckdb.IOException as error:  # it objected to something else before
        mends = mend(files, spill, error)
        _create(db, [mends.get(file, file) for file in files], since, strict=False)
    return bad, mends


def mend(files: Sequence[Path], folder: Path, error: duckdb.Error) -> dict[Path, Path]:
    """What can be read in place of packed files that break off.

    :raises ConfigError: the reader's error has another reason.
    """
    mends: dict[Path, Path] = {}
    with suppress(OSError):  # of which the reader's own error tells
        mends = mended(files, folder)
    if not mends:
        raise ConfigError("ledger", str(files[0].parent), str(error).splitlines()[0]) from error
    return mends


def _torn_lines(files: Sequence[Path]) -> Iterator[BadLine]:
    for file in files:
        for number, read in scan(file):
            if isinstance(read, BadLine):
                if not read.torn:
                    raise LedgerError(f"{file}:{number}: not a ledger record: {read.reason}")
                yield read


def _create(
    db: duckdb.DuckDBPyConnection, files: Sequence[Path], since: float | None, *, strict: bool
) -> None:
    names = [name for name in COLUMNS if name not in _LEFT_OUT]
    source, parameters = rows_of(files, names, strict=strict)
    earliest = "" if since is None else f"WHERE arrived IS NULL OR arrived >= {since!r}"
    db.execute(
        f"""CREATE OR REPLACE TABLE attempts AS
            SELECT *, {_DEPTH} AS depth FROM ({source}) {earliest}""",
        parameters,
    )


def problem_of(record: RequestRecord) -> str | None:
    """Why this record's tokens cannot be summed; None if they close."""
    try:
        record.flow.check()
    except ValueError as error:
        return str(error)
    if not record.final and record.flow != TokenFlow():
        return f"an attempt that is not final carries tokens: {record.flow}"
    return None


def _refuse_unclosed(
    db: duckdb.DuckDBPyConnection, since: float | None, mended_from: Mapping[Path, Path]
) -> None:
    """Sums that close for each record close for every group; so each record is checked."""
    # In 128 bits: the sum of two numbers must not be what cannot be reported.
    wide = ", ".join(f"t_{name}::HUGEINT AS t_{name}" for name in TERMS)
    row = db.execute(f"""
        SELECT filename FROM (SELECT filename, final, {wide} FROM attempts)
        WHERE least({", ".join(f"t_{name}" for name in TERMS)}) < 0
           OR t_prompt <> t_tail + t_cold + t_evicted + t_available
           OR t_available <> t_captured + t_diverted_for_load + t_draining + t_policy
                             + t_isolation
           OR t_delivered <> t_captured - t_stale_index - t_token_mismatch - t_unreported
                             + t_gained
           OR (NOT final AND greatest({", ".join(f"t_{name}" for name in TERMS)}) > 0)
        ORDER BY filename LIMIT 1
    """).fetchone()
    if row is None:
        return
    file = mended_from.get(Path(row[0]), Path(row[0]))
    for number, read in scan(file):
        if isinstance(read, BadLine | Dropped) or (since is not None and read.at < since):
            continue
        problem = problem_of(read)
        if problem is not None:
            raise LedgerError(f"{file}:{number}: request {read.request_id}: {problem}")
    raise LedgerError(f"{file}: a record's sums do not close")
