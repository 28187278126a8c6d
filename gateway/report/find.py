"""One request out of ledgers, by the gateway's id or the client's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb

from gateway.records import RequestRecord
from gateway.report.columns import rows_of
from gateway.report.load import mend
from gateway.report.parquet import EXPORTED, record_of
from gateway.report.sources import resolve

MOST = 64
"""Attempts given back: a client's id may stand for any number of requests."""


def find(paths: Sequence[str | Path], name: str) -> list[RequestRecord]:
    """All attempts of the request, oldest first; the last :data:`MOST` of them. Blocks.

    :raises ConfigError: a path is wrong or a file cannot be read.
    """
    files = resolve(paths)
    if not files:
        return []
    with TemporaryDirectory(prefix="headwater-find-") as spill:
        try:
            rows = _rows(files, name)
        except duckdb.Error as error:
            mends = mend(files, Path(spill), error)
            rows = _rows([mends.get(file, file) for file in files], name)
    found = [record_of(dict(zip(EXPORTED, row, strict=True))) for row in reversed(rows)]
    return [record for record in found if isinstance(record, RequestRecord)]


def _rows(files: Sequence[Path], name: str) -> list[tuple[Any, ...]]:
    """Newest first."""
    source, parameters = rows_of(files, EXPORTED, strict=False)
    with duckdb.connect(":memory:") as db:
        db.execute("SET enable_progress_bar = false")
        return db.execute(
            f"""SELECT {", ".join(EXPORTED)} FROM ({source})
                WHERE dropped IS NULL AND (id = $name OR client_id = $name)
                ORDER BY arrived DESC, attempt DESC LIMIT {MOST}""",
            {**parameters, "name": name},
        ).fetchall()
