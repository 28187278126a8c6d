"""``headwater simulate``: what other policies, or more workers, would do on a recorded trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.policyflags import ALL, OPTION_HELP, POLICY_HELP, policies_of
from shared.errors import ConfigError

if TYPE_CHECKING:  # only loaded when the command runs
    from gateway.sim.model import WorkerModel
    from gateway.sim.simulate import Progress
    from gateway.sim.trace import Trace

FORMATS = ("text", "json")
_LEAST, _MOST = 1e-4, 1e9
_MOST_BLOCKS = 50_000_000
"""About 2 GB of bookkeeping."""

app = typer.Typer()


@app.command(
    epilog="Example: headwater simulate chats.b64.jsonl.gz --workers 8 --kv-blocks 4000 --load 0.7"
    "   |   headwater simulate chats.b64.jsonl.gz --workers 8 --kv-blocks 4000 --policy cost "
    "--policy least_loaded --format json"
)
def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="A request trace, JSON lines, .gz too; or a gateway's ledger folder with the "
            "traces it kept (\\[ledger] trace).",
        ),
    ],
    workers: Annotated[int, typer.Option(help="How many workers.")],
    kv_blocks: Annotated[int, typer.Option(help="Blocks of KV memory of each worker.")],
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens per block of the trace and of the workers; without it the file's name "
            "says so (.b64.). A gateway's own: 16, or a multiple.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{POLICY_HELP} Default: all.", show_default=False),
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help=OPTION_HELP, show_default=False)] = None,
    load: Annotated[
        float | None,
        typer.Option(
            help="Scale the arrivals so that a perfect router would keep the workers busy to this "
            "share. Default: the trace's own times.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 1,
    model: Annotated[
        str,
        typer.Option(help="Of a gateway's traces, which may hold several.", show_default=False),
    ] = "",
    limit: Annotated[int, typer.Option(help="Only the first requests; 0 = all.")] = 0,
    prefill_rate: Annotated[
        float, typer.Option(help="Prompt tokens a second that a worker computes.")
    ] = 10_000.0,
    overhead: Annotated[float, typer.Option(help="Seconds per prefill, whatever its length.")] = (
        0.005
    ),
    token_time: Annotated[
        float, typer.Option(help="Seconds per output token of a sequence that is alone.")
    ] = 0.02,
    decode_knee: Annotated[
        float, typer.Option(help="So many sequences together take twice the time per token.")
    ] = 64.0,
    decode_tax: Annotated[
        float, typer.Option(help="Share by which each decoding sequence slows a prefill.")
    ] = 0.004,
    max_running: Annotated[int, typer.Option(help="Sequences that decode together at most.")] = 256,
    quadratic: Annotated[
        float, typer.Option(help="Attention's share of prefill per token of context; 2e-5 is real.")
    ] = 0.0,
    form: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    """Run a trace through the live routing code over simulated workers, policies side by side."""
    from gateway.sim.model import WorkerModel
    from gateway.sim.simulate import simulate as run
    from gateway.sim.text import to_json, to_text

    if form not in FORMATS:
        raise ConfigError("--format", form, f"is none of {', '.join(FORMATS)}")
    _at_least("--workers", workers, 1)
    _at_least("--kv-blocks", kv_blocks, 1)
    _at_least("--max-running", max_running, 1)
    _at_least("--limit", limit, 0)
    for flag, rate in (
        ("--prefill-rate", prefill_rate),
        ("--token-time", token_time),
        ("--decode-knee", decode_knee),
        ("--load", 1.0 if load is None else load),
    ):
        _between(flag, rate, _LEAST)
    for flag, share in (
        ("--overhead", overhead),
        ("--decode-tax", decode_tax),
        ("--quadratic", quadratic),
    ):
        _between(flag, share, 0.0)
    policies = policies_of(policy or [ALL], option or [])
    requests = _load(trace, block_size, limit, model)
    worker = WorkerModel(
        kv_blocks=kv_blocks,
        prefill_tokens_per_s=prefill_rate,
        overhead_s=overhead,
        token_s=token_time,
        decode_knee=decode_knee,
        decode_tax=decode_tax,
        max_running=max_running,
        quadratic=quadratic,
    )
    _fits(worker, workers, requests)
    with _progress(list(policies), len(requests.requests)) as on_progress:
        result = run(
            trace.name,
            requests,
            worker,
            workers,
            policies,
            load=load,
            seed=seed,
            on_progress=on_progress,
        )
    if form == "json":
        typer.echo(to_json(result), nl=False)
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        typer.echo(to_text(result, colour=colour), nl=False)


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(flag, value, f"must be at least {least}")


def _between(flag: str, value: float, least: float) -> None:
    if not least <= value <= _MOST:  # not a number is neither
        raise ConfigError(flag, value, f"must be a number from {least:g} to {_MOST:g}")


def _load(path: Path, block_size: int | None, limit: int, model: str) -> Trace:
    from gateway.sim.files import block_size_of, load_trace
    from gateway.sim.trace import TraceError

    size = block_size_of(path) if block_size is None else block_size
    if size is None:
        reason = "its name tells no block size (.b64.): give --block-size"
        raise ConfigError("TRACE", str(path), reason)
    _at_least("--block-size", size, 1)
    bad: list[str] = []
    try:
        trace = load_trace(
            path,
            size,
            limit,
            model,
            lambda file, line, why: bad.append(f"{file.name}:{line}: {why}"),
        )
    except TraceError as error:
        raise ConfigError("TRACE", str(path), str(error)) from error
    if bad:
        typer.echo(f"{len(bad)} lines left out that cannot be read, first {bad[0]}", err=True)
    return trace


def _fits(model: WorkerModel, workers: int, trace: Trace) -> None:
    if workers * model.kv_blocks > _MOST_BLOCKS:
        reason = f"with {workers} workers these are more than {_MOST_BLOCKS:,} blocks in all"
        raise ConfigError("--kv-blocks", model.kv_blocks, reason)
    if model.kv_blocks < trace.most_blocks:
        reason = f"the largest request of the trace needs {trace.most_blocks} blocks by itself"
        raise ConfigError("--kv-blocks", model.kv_blocks, reason)


@contextmanager
def _progress(policies: list[str], requests: int) -> Iterator[Progress]:
    """A bar on a terminal, elsewhere a line per policy; on stderr, so that stdout is the result."""
    if not sys.stderr.isatty():

        def tell(policy: str, done: int) -> None:
            if done == requests:
                typer.echo(f"{policy}: {requests} requests simulated", err=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        tasks = {policy: bar.add_task(policy, total=requests) for policy in policies}

        def move(policy: str, done: int) -> None:
            if done % 64 == 0 or done == requests:
                bar.update(tasks[policy], completed=done)

        yield move
