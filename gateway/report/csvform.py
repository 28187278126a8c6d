"""The report as CSV: one row per group (one row in all without ``--by``), exact numbers."""

from __future__ import annotations

import csv
from io import StringIO

from gateway.report.model import DEPTHS, Group, Report, Section

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_csv(report: Report) -> str:
    """A header and rows; times in seconds, empty where there was nothing to measure."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    times = [
        f"{what}_{depth}_{figure}_s"
        for what in ("ttft", "itl")
        for depth in ("all", *DEPTHS)
        for figure in ("mean", "p50", "p90", "p99")
    ]
    writer.writerow([*report.by, *report.totals, *report.lookups, *times])
    sections: list[Section] = list(report.groups) if report.by else [report]
    for section in sections:
        key = section.key if isinstance(section, Group) else {}
        spreads = [spread for by in (section.ttft_s, section.itl_s) for spread in by.values()]
        writer.writerow(
            [
                *(_safe(key[name]) for name in report.by),
                *section.totals.values(),
                *section.lookups.values(),
                *(
                    "" if value is None else f"{value:.6g}"
                    for spread in spreads
                    for value in (spread.mean, spread.p50, spread.p90, spread.p99)
                ),
            ]
        )
    return out.getvalue()


def _safe(name: str) -> str:
    """A name that no spreadsheet takes for a formula: clients choose some of them."""
    return f"'{name}" if name.startswith(_FORMULA) else name
