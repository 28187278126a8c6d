"""``headwater replay``: recorded traffic under other policies."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.policyflags import OPTION_HELP, POLICY_HELP, policies_of
from shared.errors import ConfigError

if TYPE_CHECKING:  # only loaded when the command runs
    from gateway.tracefile import Traced

FORMATS = ("text", "json")
DEFAULT = ("cost", "round_robin", "least_loaded")

app = typer.Typer()


@app.command(
    epilog="Example: headwater replay /var/lib/headwater/ledger --policy round_robin   |   "
    "headwater replay ledger/ --policy cost,session --format json"
)
def replay(
    ledger: Annotated[
        Path,
        typer.Argument(
            metavar="LEDGER",
            help="A gateway's ledger folder with the traces it kept (\\[ledger] trace, and "
            "decisions for decisions that are taken again), or one of those files.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{POLICY_HELP} Default: {', '.join(DEFAULT)}.", show_default=False),
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help=OPTION_HELP, show_default=False)] = None,
    model: Annotated[str, typer.Option(help="Where there are several.", show_default=False)] = "",
    kv_blocks: Annotated[
        int,
        typer.Option(help="Blocks of KV memory of each worker; 0: fitted to the hits recorded."),
    ] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens per block: 16, or a multiple.")] = 16,
    limit: Annotated[int, typer.Option(help="Only the first requests; 0 = all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 1,
    form: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    """What other policies would have made of recorded traffic: hits, first tokens, prefill."""
    from gateway.sim.recount import replay as run
    from gateway.sim.recounttext import to_json, to_text
    from gateway.sim.trace import TraceError

    if form not in FORMATS:
        raise ConfigError("--format", form, f"is none of {', '.join(FORMATS)}")
    for flag, number, least in (
        *(("--kv-blocks", kv_blocks, 0), ("--block-size", block_size, 1)),
        *(("--limit", limit, 0),),
    ):
        if number < least:
            raise ConfigError(flag, number, f"must be at least {least}")
    policies = policies_of(policy or DEFAULT, option or [])
    requests = _load(ledger, limit, model)
    try:
        result = run(
            ledger.name,
            requests,
            policies,
            block_size=block_size,
            kv_blocks=kv_blocks,
            seed=seed,
            on_progress=lambda what: typer.echo(what, err=True),
        )
    except TraceError as error:
        raise ConfigError("--block-size", block_size, str(error)) from error
    if form == "json":
        typer.echo(to_json(result), nl=False)
        return
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    typer.echo(to_text(result, colour=colour), nl=False)


def _load(path: Path, limit: int, model: str) -> list[Traced]:
    from gateway.sim.recorded import answered
    from gateway.sim.trace import TraceError
    from gateway.tracefile import TraceFileError, read_traced, trace_files

    bad: list[str] = []
    try:
        requests = answered(
            read_traced(
                trace_files(path), lambda file, line, why: bad.append(f"{file.name}:{line}: {why}")
            ),
            limit,
            model,
        )
    except (TraceError, TraceFileError) as error:
        raise ConfigError("LEDGER", str(path), str(error)) from error
    if bad:
        typer.echo(f"{len(bad)} lines left out that cannot be read, first {bad[0]}", err=True)
    return requests
