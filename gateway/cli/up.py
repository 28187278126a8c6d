"""``headwater up``: a whole local cluster in one process tree."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gateway.cluster import plan, status
from gateway.cluster.child import ChildFailed
from gateway.cluster.plan import ClusterOptions
from gateway.cluster.redisserver import server_spec
from gateway.cluster.supervisor import Supervisor
from gateway.ledger import default_dir
from gateway.plugins import find_policy
from shared import redisurl
from shared.errors import ConfigError
from shared.redislink import RedisLink, RedisLost

app = typer.Typer()

LAST_PORT = 65_535
REDIS_ANSWER_S = 2.0
WHOLE_S = 10.0
"""How long the ready line waits, once gateways have a worker, for the other workers."""


@app.command(
    epilog="Example: headwater up --workers 2 --model smollm2   |   "
    "headwater up --fake --workers 4 --gateways 2"
)
def up(
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 2,
    model: Annotated[
        str, typer.Option(help="Directory, hub id or GGUF file; smollm2 is the small default.")
    ] = "smollm2",
    gateways: Annotated[int, typer.Option(min=1, help="Number of gateways.")] = 1,
    port: Annotated[
        int,
        typer.Option(min=1, max=65000, help="First gateway's port; the next ones +10, admin +1."),
    ] = 8000,
    worker_port: Annotated[
        int, typer.Option(min=1, max=65000, help="First worker's port; the next ones +1.")
    ] = plan.FIRST_WORKER_PORT,
    redis: Annotated[
        str, typer.Option(help="URL of a server; auto starts one; none works without.")
    ] = "auto",
    policy: Annotated[
        str | None, typer.Option(help="Routing policy, see docs/policies.md (default: cost).")
    ] = None,
    fake: Annotated[bool, typer.Option("--fake", help="Workers without torch.")] = False,
    kv_blocks: Annotated[
        int, typer.Option(min=0, help="KV blocks per worker; 0 takes what fits in memory.")
    ] = 0,
    pin: Annotated[
        bool, typer.Option("--pin", help="Bind each worker to cores of its own (Linux).")
    ] = False,
) -> None:
    """A local cluster: Redis, workers and gateway(s). Ctrl-C stops all of it."""
    allowed = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else ()
    if pin and len(allowed) < workers:
        raise ConfigError("--pin", pin, f"{workers} workers, {len(allowed)} cores to bind them to")
    if policy is not None:
        find_policy(policy, "--policy")
    cores = len(allowed) or os.cpu_count() or 1
    options = ClusterOptions(
        workers=workers,
        gateways=gateways,
        port=port,
        model=model,
        policy=policy,
        fake=fake,
        threads=max(1, cores // workers),
        cores=tuple(allowed) if pin else (),
        worker_flags=("--kv-blocks", str(kv_blocks)) if kv_blocks else (),
        worker_port=worker_port,
    )
    check_ports(options)
    raise typer.Exit(asyncio.run(run_cluster(options, redis)))


def check_ports(options: ClusterOptions) -> None:
    """Raise ``ConfigError`` for a port that is taken, before anything is started."""
    wanted = [("--port", port) for pair in plan.gateway_ports(options) for port in pair]
    wanted += [("--worker-port", options.worker_port + i) for i in range(options.workers)]
    ours: set[int] = set()
    for key, port in wanted:
        if port > LAST_PORT:
            raise ConfigError(key, port, f"there are only {LAST_PORT} ports: begin lower")
        if port in ours:
            raise ConfigError(key, port, "a gateway and a worker would listen there")
        ours.add(port)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise ConfigError(key, port, f"cannot listen there: {error.strerror}") from error


def state_dir() -> Path:
    """Where logs go: ``$XDG_STATE_HOME/headwater``."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "headwater"


async def run_cluster(options: ClusterOptions, redis: str) -> int:
    """Start, show, wait for Ctrl-C, stop; returns the exit code."""
    logs = state_dir() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ledger = Path(os.environ.get("HEADWATER_LEDGER__DIR") or default_dir(os.environ))
    if redis not in ("auto", "none"):
        redisurl.check(redis)
        await tell_redis(redis)
    supervisor = Supervisor(say)
    supervisor.watch_signals()
    with tempfile.TemporaryDirectory(prefix="headwater-") as folder:
        try:
            redis_url = redis
            if redis == "auto":
                spec, redis_url = server_spec(Path(folder), logs / "redis.log")
                await supervisor.start([spec], wait=True)
            what = "fake workers" if options.fake else f"{options.model} workers"
            say(
                f"starting {options.workers} {what}, {options.threads} thread(s) each; logs: {logs}"
            )
            await supervisor.start(plan.worker_specs(options, redis_url, logs), wait=False)
            gateways = plan.gateway_specs(options, redis_url, logs, ledger)
            await supervisor.start(gateways, wait=True)
            await status.until_whole(options, supervisor, WHOLE_S)
            if not supervisor.leaving:
                for port, _ in plan.gateway_ports(options):
                    say(f"ready http://127.0.0.1:{port}")
                await status.show(options, supervisor)
        except ChildFailed as failure:
            typer.echo(f"headwater: {failure}", err=True)
            return failure.code
        finally:
            await supervisor.stop()
    return 0


async def tell_redis(url: str) -> None:
    """Say so if a Redis that was named does not answer; the cluster works without it."""
    link = RedisLink(url, REDIS_ANSWER_S, "headwater-up")
    try:
        await link.call([("ROLE",)])
    except RedisLost as error:
        say(
            f"warning: redis {redisurl.shown(url)} does not answer ({error}); going on without it: "
            "gateways follow the workers directly, and use it once it is there"
        )
    finally:
        await link.drop()


def say(text: str) -> None:
    """One line for the user, at once even into a pipe."""
    typer.echo(text)
    sys.stdout.flush()
