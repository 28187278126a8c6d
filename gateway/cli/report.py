"""``headwater report``: where the prompt tokens went."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from shared.errors import ConfigError

if TYPE_CHECKING:  # DuckDB loads only when the command runs
    from gateway.report import Report

FORMATS = ("text", "json", "html", "csv", "parquet")
URL = re.compile(r"(rediss?|unix|redis\+\w+)://")
BIG = 200 * 2**20
"""Reading that many bytes of ledger takes seconds: it is told that something is going on."""

app = typer.Typer()


@app.command(
    epilog="Example: headwater report --since 1h --by worker   |   "
    "headwater report ledgers/*.jsonl.gz --format html -o report.html"
)
def report(
    ledger: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ledger files (.gz and .parquet too), folders or patterns, or the URL of the "
            "Redis that keeps a shared ledger; without any, the "
            "folder in HEADWATER_LEDGER__DIR, else the one that `headwater up` writes to.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str, typer.Option(help="Only requests since then: 30m, 1h, 2d, or an ISO time (UTC).")
    ] = "",
    by: Annotated[
        str, typer.Option(help="Group by any of model,tenant,worker,family,policy.")
    ] = "",
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="text, json, html, csv (one row per group), or parquet (the records themselves).",
        ),
    ] = "text",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file.")
    ] = None,
) -> None:
    """How much of the prompts was reused, what that saved, and where the rest went, by name."""
    from gateway.ledger import default_dir
    from gateway.report import EmptyLedger, LedgerError, parse_by, parse_since

    if form not in FORMATS:
        raise ConfigError("--format", form, f"is none of {', '.join(FORMATS)}")
    if form == "parquet" and output is None:
        raise ConfigError("-o", "", "is needed with --format parquet")
    where = ledger or [os.environ.get("HEADWATER_LEDGER__DIR") or str(default_dir(os.environ))]
    start = parse_since(since, time.time()) if since else None
    groups = parse_by(by)
    try:
        with _files(where) as files, _at_work(files):
            shown = _made(files, start, groups, form, output)
    except (EmptyLedger, LedgerError) as error:
        typer.echo(f"headwater report: {error}", err=True)
        raise typer.Exit(1) from error
    if shown is not None:
        _write(shown, output)


def _made(
    where: list[str], start: float | None, groups: tuple[str, ...], form: str, output: Path | None
) -> str | None:
    """The report in its form; None if it went straight into ``output``."""
    from gateway.report import summarise

    if form == "parquet":
        from gateway.report.parquet import export

        assert output is not None
        export(where, start, output)
        return None
    return _render(summarise(where, start, groups), form, to_file=output is not None)


@contextmanager
def _files(where: list[str]) -> Iterator[list[str]]:
    """The same with the ledgers of Redis streams in temporary files."""
    if not any(URL.match(given) for given in where):
        yield where
        return
    from gateway.ledgerstream import read_stream
    from shared.redislink import RedisLost
    from shared.redisurl import shown
    from shared.settings import DeploymentConfig

    deployment = os.environ.get("HEADWATER_DEPLOYMENT__NAME") or DeploymentConfig().name
    with TemporaryDirectory(prefix="headwater-stream-") as folder:
        files = list(where)
        for number, given in enumerate(where):
            if not URL.match(given):
                continue
            files[number] = str(Path(folder) / f"{number}.jsonl")
            try:
                with Path(files[number]).open("wb") as file:
                    file.writelines(line + b"\n" for line in read_stream(given, deployment))
            except RedisLost as error:
                raise ConfigError("ledger", shown(given), f"cannot be read: {error}") from error
        yield files


@contextmanager
def _at_work(where: list[str]) -> Iterator[None]:
    """On standard error, where there is much to read: a moving line on a terminal, else one."""
    from gateway.report.sources import resolve

    size = sum(file.stat().st_size for file in resolve(where))
    if size < BIG:
        yield
        return
    text = f"reading {size / 2**30:.1f} GiB of ledger"
    if not sys.stderr.isatty():
        typer.echo(text, err=True)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def _render(result: Report, form: str, *, to_file: bool) -> str:
    from gateway.report import to_csv, to_html, to_json, to_text

    make = {"json": to_json, "html": to_html, "csv": to_csv}.get(form)
    if make is not None:
        return make(result)
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
