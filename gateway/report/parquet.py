"""Ledgers as Parquet: one row per attempt, one column per field, for further analysis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb

from gateway.ledgerline import Dropped, path_keys
from gateway.records import Outcome, RequestRecord, Shadow, TokenFlow, Why
from gateway.report.columns import COLUMNS, TERMS, rows_of
from gateway.report.load import ledgers, load
from shared.errors import ConfigError

EXPORTED = tuple(name for name in COLUMNS if name != "broken")
"""Columns of a file, in order."""
_BATCH = 4096


def export(paths: Sequence[str | Path], since: float | None, target: Path) -> int:
    """Write all records, and the notes of lost ones, into one Parquet file. Blocks.

    :returns: how many records.
    :raises ConfigError: a path is wrong, or ``target`` cannot be written.
    :raises EmptyLedger: no record there.
    :raises LedgerError: as for a report: what cannot be summed is not exported either.
    """
    files = ledgers(paths)
    with load(files, since) as loaded:
        source, parameters = rows_of(files, EXPORTED, strict=False)
        earliest = "" if since is None else f"AND arrived >= {since!r}"
        try:
            loaded.db.execute(
                f"""COPY (SELECT * EXCLUDE (filename) FROM ({source})
                          WHERE arrived IS NOT NULL {earliest})
                    TO {_literal(target)} (FORMAT parquet, COMPRESSION zstd)""",
                parameters,
            )
        except duckdb.IOException as error:
            raise ConfigError("-o", str(target), str(error).splitlines()[0]) from error
        return loaded.records


def rows(file: Path) -> Iterator[RequestRecord | Dropped]:
    """What a Parquet file holds, row by row.

    :raises ConfigError: it is no such file.
    """
    with duckdb.connect(":memory:") as db:
        try:
            cursor = db.execute(f"SELECT {', '.join(EXPORTED)} FROM read_parquet({_literal(file)})")
            while batch := cursor.fetchmany(_BATCH):
                for row in batch:
                    yield record_of(dict(zip(EXPORTED, row, strict=True)))
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
            raise ConfigError("ledger", str(file), f"cannot be read: {reason}") from error


def record_of(row: dict[str, Any]) -> RequestRecord | Dropped:
    """A row of :data:`EXPORTED` columns."""
    if row["dropped"] is not None:
        return Dropped(at=row["arrived"], dropped=row["dropped"])
    why = None
    if row["reason"]:
        why = Why(
            code=row["reason"],
            term=row["term"],
            other=row["other"],
            other_matched=row["other_matched"],
            gap=row["gap"],
        )
    shadow = None
    if row["rr_matched"] is not None:
        shadow = Shadow(matched_tokens=row["rr_matched"], ttft_s=row["rr_ttft_s"])
    return RequestRecord(
        at=row["arrived"],
        request_id=row["id"],
        attempt=row["attempt"],
        final=row["final"],
        outcome=Outcome(row["outcome"]),
        flow=TokenFlow(**{name: row[f"t_{name}"] for name in TERMS}),
        path=path_keys(row["path"]),
        output_tokens=row["out"],
        predicted_ttft_s=row["predicted_s"],
        prompt_tokens=row["prompt"],
        matched_tokens=row["matched"],
        why=why,
        round_robin=shadow,
        **{name: row[name] for name in _SAME},
    )


_SAME = ("route", "model", "tenant", "family", "policy", "worker", "trust", "status", "decided_s",
         "ttft_s", "total_s", "itl_s", "reported", "client_id")  # fmt: skip
"""Columns that are fields under the same name."""


def _literal(path: Path) -> str:
    """A file name in SQL."""
    return "'" + str(path).replace("'", "''") + "'"
