"""Findings for people: a table on terminals, one line each elsewhere; and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.doctor.checks import Finding, Status, failed

MARKS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red", Status.SKIPPED: "dim"}


def to_json(findings: Sequence[Finding]) -> str:
    """``ok``, ``counts`` by status and ``findings``."""
    whole = {
        "ok": not failed(list(findings)),
        "counts": counts(findings),
        "findings": [asdict(one) for one in findings],
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode() + "\n"


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """How many there are of each status."""
    number = Counter(one.status for one in findings)
    return {status.value: number[status] for status in Status}


def to_lines(findings: Sequence[Finding]) -> str:
    """``STATUS  SUBJECT  CHECK: DETAIL`` and, indented below, what to do."""
    lines = []
    for one in findings:
        lines.append(f"{one.status.value:7}  {one.subject}  {one.check}: {_plain(one.detail)}")
        if one.fix:
            lines.append(f"         fix: {_plain(one.fix)}")
    return "\n".join([*lines, summary(findings)]) + "\n"


def to_table(findings: Sequence[Finding], width: int, *, colour: bool) -> str:
    """The same for a terminal; what to do stands below what is wrong."""
    out = StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("", "subject", "check", "what was seen"):
        table.add_column(name, overflow="fold")
    before = ""
    for one in findings:
        detail = Text(_plain(one.detail))
        if one.fix:
            detail.append(f"\n-> {_plain(one.fix)}", "bold")
        subject = one.subject if one.subject != before else ""
        before = one.subject
        style = MARKS[one.status]
        table.add_row(Text(one.status.value, style), Text(subject), Text(one.check), detail)
    console.print(table)
    console.print(Text(summary(findings), "bold"))
    return out.getvalue()


def summary(findings: Sequence[Finding]) -> str:
    """One line."""
    number = counts(findings)
    told = ", ".join(f"{count} {status}" for status, count in number.items() if count)
    return f"{'failed' if failed(list(findings)) else 'good'}: {told}"


def _plain(text: str) -> str:
    """Peers' words without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)
