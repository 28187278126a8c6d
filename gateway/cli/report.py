"""``headwater report``: where the prompt tokens went."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.errors import ConfigError

if TYPE_CHECKING:  # DuckDB loads only when the command runs
    from gateway.report import Report

FORMATS = ("text", "json")

app = typer.Typer()


@app.command(
    epilog="Example: headwater report --since 1h --by worker   |   "
    "headwater report ledgers/*.jsonl.gz --format json -o report.json"
)
def report(
    ledger: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ledger files (.gz too), folders or patterns; without any, the folder in "
            "HEADWATER_LEDGER__DIR, else the one that `headwater up` writes to.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str, typer.Option(help="Only requests since then: 30m, 1h, 2d, or an ISO time (UTC).")
    ] = "",
    by: Annotated[
        str, typer.Option(help="Group by any of model,tenant,worker,family,policy.")
    ] = "",
    form: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file.")
    ] = None,
) -> None:
    """How much of the prompts was reused, what that saved, and where the rest went, by name."""
    from gateway.ledger import default_dir
    from gateway.report import EmptyLedger, LedgerError, parse_by, parse_since, summarise

    if form not in FORMATS:
        raise ConfigError("--format", form, f"is none of {', '.join(FORMATS)}")
    where = ledger or [os.environ.get("HEADWATER_LEDGER__DIR") or str(default_dir(os.environ))]
    start = parse_since(since, time.time()) if since else None
    try:
        result = summarise(where, start, parse_by(by))
    except (EmptyLedger, LedgerError) as error:
        typer.echo(f"headwater report: {error}", err=True)
        raise typer.Exit(1) from error
    _write(_render(result, form, to_file=output is not None), output)


def _render(result: Report, form: str, *, to_file: bool) -> str:
    from gateway.report import to_json, to_text

    if form == "json":
        return to_json(result)
    terminal = not to_file and sys.stdout.isatty()
    return to_text(result, colour=terminal and "NO_COLOR" not in os.environ)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("-o", str(output), f"cannot be written: {error.strerror}") from error
