"""``headwater gateway``: one gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.config import GatewayConfig
from gateway.inherited import Inherited
from shared.settings import load

if TYPE_CHECKING:
    from gateway.processes.parent import Origin

app = typer.Typer()

EXIT_AT_ONCE = 130
COLLECT = (10_000, 10, 10)
"""Thresholds of the garbage collector. A request leaves some hundred containers and hardly a cycle:
the usual 700, 10, 10 look for cycles at each of them, a tenth of what it costs."""


@app.command(
    epilog="Example: headwater gateway --workers http://10.0.0.1:8000,http://10.0.0.2:8000 "
    "--redis redis://10.0.0.9:6379/0"
)
def gateway(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="TOML file; see docs/configuration.md.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="Base URLs of workers, with commas between them.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address of the public listener.")] = None,
    port: Annotated[int | None, typer.Option(help="Its port; 0 takes a free one.")] = None,
    admin_host: Annotated[str | None, typer.Option(help="Address of the admin listener.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Its port; 0 takes a free one.")] = None,
    redis: Annotated[
        str | None, typer.Option(help="URL of the shared index; none works without.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Routing policy (default: cost).")] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes on the one port, for more than a core's work (default: 1)."
        ),
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(help="Folder for the records that `headwater report` reads.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the configuration and leave; asks nobody.")
    ] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint in front of workers.

    SIGTERM drains, then exits; SIGHUP or a changed file loads the configuration again.
    """
    flags = {
        "workers.urls": workers,
        "listen.host": host,
        "listen.port": port,
        "listen.admin_host": admin_host,
        "listen.admin_port": admin_port,
        "redis.url": redis,
        "routing.policy": policy,
        "listen.processes": processes,
        "ledger.dir": ledger,
        "log.level": log_level,
    }
    read = partial(load, GatewayConfig, file=config, env=os.environ, flags=flags)
    settings = read()
    if check:
        from gateway.openers import check_config

        check_config(settings)
        typer.echo("the configuration is good")
        raise typer.Exit(0)
    if settings.listen.processes > 1:
        from gateway.processes.parent import Origin

        raise typer.Exit(_run_many(settings, Origin(read, config, flags)))
    raise typer.Exit(run(settings, read, config))


def run(
    config: GatewayConfig,
    read: Callable[[], GatewayConfig] | None = None,
    path: Path | None = None,
    inherited: Inherited | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises ``ConfigError``.

    :param read: loads the configuration again; None: it stays as it is.
    :param path: the file to be watched.
    :param inherited: its sockets, where it is one of several processes on a port.
    """
    import uvloop

    from shared.logs import configure

    configure(config.log)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, read or (lambda: config), path, inherited))


def _run_many(config: GatewayConfig, origin: Origin) -> int:
    from gateway.processes import parent
    from shared.logs import configure

    configure(config.log)
    _raise_file_limit()
    return parent.run(config, origin, _say)


async def _serve(
    config: GatewayConfig,
    read: Callable[[], GatewayConfig],
    path: Path | None,
    inherited: Inherited | None,
) -> int:
    from gateway.build import Gateway
    from gateway.configwatch import ConfigWatch

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    server = Gateway(config, inherited)
    watch = ConfigWatch(path, read, server.reload)
    server.tell_of_config(watch.notes)
    loop.add_signal_handler(signal.SIGHUP, watch.ask)
    watching = asyncio.create_task(watch.run(), name="configuration")
    try:
        await server.start()
        _spare_collector()
        _say(f"listening {server.url}")
        announce = asyncio.create_task(_announce(server), name="announce")
        await stop.wait()
        announce.cancel()
        await server.drain()
    finally:
        watching.cancel()
        await server.close()
    return 0


async def _announce(server: object) -> None:
    from gateway.build import Gateway

    assert isinstance(server, Gateway)
    await server.until_ready()
    _say(f"ready {server.url}")


def _spare_collector() -> None:
    """What was made up to here stays: it need not be looked at again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)


def _on_signal(stop: asyncio.Event) -> None:
    """The first signal drains; a second one does not wait for anything."""
    if stop.is_set():
        os._exit(EXIT_AT_ONCE)
    stop.set()


def _say(text: str) -> None:
    """A line for whoever started us; that nobody reads it is no reason to stop."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _raise_file_limit() -> None:
    """Each request may need two sockets; the usual soft limit of 1024 is soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
