"""``headwater bench``: real load against a running cluster."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import httpx
import msgspec
import typer

from gateway.cli.explain import checked_url
from gateway.routing.catalogue import FACTORIES
from shared.errors import ConfigError, HeadwaterError

if TYPE_CHECKING:  # only loaded when the command runs
    from gateway.loadtest.driver import Target
    from gateway.loadtest.result import BenchResult, Run
    from gateway.loadtest.workloads import Session, Shape

FORMATS = ("text", "json")
KINDS = ("multiturn", "rag", "agent", "fewshot", "unique")
WARM_SESSIONS = 2
_DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer()


class BenchFailed(HeadwaterError):
    """There is nothing to measure; the message is one line."""


@app.command(
    epilog="Example: headwater bench --url http://127.0.0.1:8000 --workload multiturn   |   "
    "headwater bench --workload rag --compare cost,round_robin --rounds 3 -o rag.json"
)
def bench(
    url: Annotated[
        str, typer.Option(help="Of the gateway (or of any OpenAI-compatible server).")
    ] = _DEFAULT_URL,
    workload: Annotated[
        str, typer.Option(help=f"{', '.join(KINDS)}, or a trace file (as for simulate).")
    ] = "multiturn",
    compare: Annotated[
        str,
        typer.Option(
            help="Policies, with commas: each serves the same load in turns, with other text so "
            "that none finds the others' caches. The gateway must allow it "
            "(\\[routing] allow_policy_header).",
            show_default=False,
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(help="Default: the first that the server lists.", show_default=False)
    ] = "",
    api_key: Annotated[
        str, typer.Option(help="Bearer token.", envvar="HEADWATER_API_KEY", show_default=False)
    ] = "",
    sessions: Annotated[
        int, typer.Option(help="How many; rag, fewshot and unique ask one by one.")
    ] = 40,
    turns: Annotated[int, typer.Option(help="Requests per session.")] = 5,
    groups: Annotated[
        int, typer.Option(help="Shared system prompts, documents or example sets.")
    ] = 4,
    shared_words: Annotated[int, typer.Option(help="Length of what is shared, in words.")] = 600,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 32,
    concurrency: Annotated[int, typer.Option(help="Sessions at a time (closed loop).")] = 8,
    rate: Annotated[
        float | None,
        typer.Option(help="Sessions per second at random gaps (open loop).", show_default=False),
    ] = None,
    speed: Annotated[float, typer.Option(help="Of a trace: 2 = twice as fast.")] = 1.0,
    block_size: Annotated[
        int | None,
        typer.Option(help="Of a trace whose name does not tell it.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(help="Of a trace: only the first requests; 0 = all.")] = 0,
    rounds: Annotated[int, typer.Option(help="How often each policy is measured.")] = 1,
    seed: Annotated[int, typer.Option(help="Of text and arrivals.")] = 1,
    against: Annotated[
        Path | None,
        typer.Option(help="An earlier result (-o) to compare with.", show_default=False),
    ] = None,
    form: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write the result, JSON, here.")
    ] = None,
) -> None:
    """Real load against a running cluster: first token, pace, hit rate, balance, by policy."""
    from gateway.loadtest.workloads import Shape

    if form not in FORMATS:
        raise ConfigError("--format", form, f"is none of {', '.join(FORMATS)}")
    counts = (
        *(("--sessions", sessions), ("--turns", turns), ("--groups", groups)),
        *(("--shared-words", shared_words), ("--max-tokens", max_tokens)),
        *(("--concurrency", concurrency), ("--rounds", rounds)),
    )
    _check(counts, (("--rate", 1.0 if rate is None else rate), ("--speed", speed)))
    checked_url(url, _DEFAULT_URL)
    before = None if against is None else _earlier(against)
    shape = Shape(
        sessions=sessions,
        groups=groups,
        turns=turns,
        shared_words=shared_words,
        max_tokens=max_tokens,
    )
    plan = _Plan(
        policies=_policies(compare),
        rounds=rounds,
        make=_maker(workload, shape, seed, speed, block_size, limit),
        concurrency=None if workload not in KINDS or rate is not None else concurrency,
        rate=rate,
        seed=seed,
    )
    result = _measure(_target(url.rstrip("/"), model, api_key), Path(workload).name, plan)
    _show(result, before, form, output)
    if any(run.errors for run in result.runs):
        raise typer.Exit(1)


def _check(counts: Sequence[tuple[str, int]], reals: Sequence[tuple[str, float]]) -> None:
    for flag, number in counts:
        if number < 1:
            raise ConfigError(flag, number, "must be at least 1")
    for flag, real in reals:
        if not 0 < real < float("inf"):
            raise ConfigError(flag, real, "must be a number above 0")


def _policies(compare: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in compare.split(",") if name.strip())
    for name in names:
        if name not in FACTORIES and ":" not in name:
            raise ConfigError("--compare", name, f"is no policy; there are {', '.join(FACTORIES)}")
    return names or ("",)


def _earlier(path: Path) -> BenchResult:
    from gateway.loadtest.result import BenchResult

    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except OSError as error:
        raise ConfigError("--against", str(path), error.strerror or str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError("--against", str(path), f"is no result of bench: {error}") from error


def _maker(
    workload: str, shape: Shape, seed: int, speed: float, block_size: int | None, limit: int
) -> Callable[[str], list[Session]]:
    """Makes the sessions for a mark."""
    from gateway.loadtest.tracetext import sessions_of
    from gateway.loadtest.workloads import WORKLOADS

    if workload in WORKLOADS:
        return lambda mark: WORKLOADS[workload](shape, Random(seed), mark)
    path = Path(workload)
    if not path.exists():
        reason = f"is none of {', '.join(KINDS)}, and no file"
        raise ConfigError("--workload", workload, reason)
    from gateway.sim.files import block_size_of, load_trace
    from gateway.sim.trace import TraceError

    size = block_size_of(path) if block_size is None else block_size
    if size is None or size < 1:
        raise ConfigError("--block-size", str(size), "the file's name tells no block size (.b64.)")
    try:
        trace = load_trace(path, size, limit)
    except TraceError as error:
        raise ConfigError("--workload", workload, str(error)) from error
    return lambda mark: sessions_of(trace, seed, mark, speed)


def _target(url: str, model: str, api_key: str) -> Target:
    from gateway.loadtest.driver import Target

    headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
    if not model:
        try:
            answer = httpx.get(f"{url}/v1/models", headers=dict(headers), timeout=10.0)
            answer.raise_for_status()
            model = answer.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BenchFailed(f"{url} cannot be asked for its models: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError):
            raise BenchFailed(f"{url} lists no model; --model names one") from None
    return Target(url=url, model=model, headers=headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    policies: tuple[str, ...]
    """One empty name: the cluster as it is."""
    rounds: int
    make: Callable[[str], list[Session]]
    concurrency: int | None
    rate: float | None
    seed: int


def _measure(target: Target, workload: str, plan: _Plan) -> BenchResult:
    """All rounds, the policies in turns."""
    from gateway.loadtest.result import BenchResult
    from gateway.loadtest.workloads import opening

    nonce = secrets.token_hex(3)  # what an earlier call sent must not be in the caches
    runs = [
        asyncio.run(_run(target, policy, plan, opening(nonce, number)))
        for number, policy in enumerate(turns_of(plan.policies, plan.rounds))
    ]
    return BenchResult(
        url=target.url,
        model=target.model,
        workload=workload,
        seed=plan.seed,
        concurrency=plan.concurrency,
        rate=plan.rate,
        runs=runs,
    )


def turns_of(policies: Sequence[str], rounds: int) -> list[str]:
    """Who is measured after whom: there and back, so that a machine that gets slower or faster
    meanwhile does so for all alike."""
    ways = (policies, policies[::-1])
    return [policy for number in range(rounds) for policy in ways[number % 2]]


async def _run(target: Target, policy: str, plan: _Plan, mark: str) -> Run:
    from gateway.loadtest.driver import Driver
    from gateway.loadtest.result import run_of
    from gateway.loadtest.workloads import Shape, unique

    if policy:
        target = replace(target, headers=(*target.headers, ("x-headwater-policy", policy)))
        await _obeyed(target, policy)
    sessions = plan.make(mark)
    few = Shape(sessions=WARM_SESSIONS, turns=1, shared_words=20, max_tokens=1)
    warm = unique(few, Random(plan.seed), f"warm {mark}")
    await Driver(target).run(warm, concurrency=1, rate=None, seed=0)
    requests = sum(len(session.turns) for session in sessions)
    with _progress(policy or "bench", requests) as on_done:
        driver = Driver(target, on_done)
        done, took, client = await driver.run(
            sessions, concurrency=plan.concurrency, rate=plan.rate, seed=plan.seed
        )
    return run_of(policy, done, took, client)


async def _obeyed(target: Target, policy: str) -> None:
    """Whether the gateway lets the client choose.

    :raises BenchFailed: it does not.
    """
    body = {
        "model": target.model,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "x"}],
    }
    try:
        async with httpx.AsyncClient(timeout=60.0) as client:
            answer = await client.post(
                f"{target.url}/v1/chat/completions", json=body, headers=dict(target.headers)
            )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchFailed(f"{target.url} cannot be asked: {error}") from error
    if answer.headers.get("x-headwater-policy") != policy:
        raise BenchFailed(
            f"the gateway did not route by '{policy}': it needs [routing] allow_policy_header = "
            "true, and [listen] headers"
        )


def _show(result: BenchResult, before: BenchResult | None, form: str, output: Path | None) -> None:
    from gateway.loadtest.text import to_text

    encoded = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
    if output is not None:
        try:
            output.write_bytes(encoded)
        except OSError as error:
            raise BenchFailed(f"{output} cannot be written: {error.strerror}") from error
    if form == "json":
        typer.echo(encoded.decode(), nl=False)
        return
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    typer.echo(to_text(result, before=before, colour=colour), nl=False)


@contextmanager
def _progress(name: str, requests: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, elsewhere a line at the end; on stderr."""
    if not sys.stderr.isatty():
        yield lambda: None
        typer.echo(f"{name}: {requests} requests", err=True)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=requests)
        yield lambda: bar.advance(task)
