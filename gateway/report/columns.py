"""Ledger lines as rows: every column of a record, its defaults filled in, in SQL for DuckDB.

Parquet files hold these columns as they are (all but ``broken``); lines of JSON of every version
become the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gateway.ledgerline import FLOW_KEYS, POLICY, ROUTE, TRUST, VERSION
from gateway.records import TokenFlow
from gateway.report.sources import PARQUET

TERMS = TokenFlow.__struct_fields__

_FLOW = ", ".join(f'"{key}" BIGINT' for key in FLOW_KEYS.values())
_TEXTS = ("id", "cid", "route", "model", "tenant", "family", "path", "policy", "worker", "trust",
          "outcome", "why")  # fmt: skip
_JSON = {
    "v": "INTEGER",
    "at": "DOUBLE",
    **dict.fromkeys(_TEXTS, "VARCHAR"),
    "try": "INTEGER",
    "final": "BOOLEAN",
    "status": "INTEGER",
    "flow": f"STRUCT({_FLOW})",
    "out": "BIGINT",
    **dict.fromkeys(("decided_s", "ttft_s", "total_s", "itl_s", "predicted_s"), "DOUBLE"),
    "reported": "BOOLEAN",
    "prompt": "BIGINT",
    "matched": "BIGINT",
    "alt": "VARCHAR[]",
    "rr": "DOUBLE[]",
    "dropped": "BIGINT",
}
"""Keys of a line and their types."""


def _usual(name: str, value: str) -> str:
    """What an absent key means: nothing in version 1, the usual value since."""
    return f"coalesce({name}, CASE WHEN v > 1 THEN '{value}' ELSE '' END)"


COLUMNS = {
    "arrived": '"at"',
    "id": "id",
    "client_id": "coalesce(cid, '')",
    "attempt": 'coalesce("try", 1)',
    "final": "coalesce(final, true)",
    "route": _usual("route", ROUTE),
    "model": "model",
    "tenant": "coalesce(tenant, '')",
    "family": "coalesce(family, '')",
    "path": "coalesce(path, '')",
    "policy": _usual("policy", POLICY),
    "worker": "coalesce(worker, '')",
    "trust": _usual("trust", TRUST),
    "outcome": "coalesce(outcome, 'ok')",
    "status": "coalesce(status, 200)",
    "out": "coalesce(out, 0)",
    "decided_s": "coalesce(decided_s, 0)",
    "ttft_s": "ttft_s",
    "total_s": "coalesce(total_s, 0)",
    "itl_s": "itl_s",
    "predicted_s": "predicted_s",
    "reported": "coalesce(reported, true)",
    **{f"t_{name}": f'coalesce(flow."{key}", 0)' for name, key in FLOW_KEYS.items()},
    "prompt": 'coalesce(prompt, flow."prompt", 0)',
    "matched": 'coalesce(matched, flow."captured", 0)',
    "reason": "split_part(coalesce(why, ''), ':', 1)",
    "term": "split_part(coalesce(why, ''), ':', 2)",
    "other": "coalesce(alt[1], '')",
    "other_matched": "CAST(coalesce(alt[2], '0') AS BIGINT)",
    "gap": "CAST(coalesce(alt[3], '0') AS DOUBLE)",
    "rr_matched": "CAST(rr[1] AS BIGINT)",
    "rr_ttft_s": "rr[2]",
    "dropped": "dropped",
    "broken": f"""dropped IS NULL AND ("at" IS NULL OR id IS NULL OR model IS NULL OR v > {VERSION}
                  OR (route IS NULL AND coalesce(v, 1) = 1))""",
}
"""Column of a row -> how a line gives it."""


def rows_of(
    files: Sequence[Path], columns: Sequence[str], *, strict: bool
) -> tuple[str, dict[str, list[str]]]:
    """A query for ``columns`` and ``filename`` of all files, and its parameters.

    :param strict: fail at a line that is no JSON; else it is a row of NULLs.
    """
    parts, parameters = [], {}
    lines = [file for file in files if file.suffix != PARQUET]
    tables = [file for file in files if file.suffix == PARQUET]
    if lines:
        chosen = ", ".join(f"{COLUMNS[name]} AS {name}" for name in columns)
        kinds = ", ".join(f"'{name}': '{kind}'" for name, kind in _JSON.items())
        parts.append(f"""
            SELECT filename, {chosen}
            FROM read_json($lines, columns = {{{kinds}}}, format = 'newline_delimited',
                           filename = true, ignore_errors = {"false" if strict else "true"})
        """)
        parameters["lines"] = _literal(lines)
    if tables:
        chosen = ", ".join("false AS broken" if name == "broken" else name for name in columns)
        parts.append(f"SELECT filename, {chosen} FROM read_parquet($tables, filename = true)")
        parameters["tables"] = _literal(tables)
    return " UNION ALL ".join(parts), parameters


def _literal(files: Sequence[Path]) -> list[str]:
    """Names that are no patterns."""
    return [re.sub(r"([*?\[])", r"[\1]", str(file)) for file in files]
