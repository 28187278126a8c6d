"""``headwater worker``: flags are settings of the same file and environment keys."""

from __future__ import annotations

import asyncio
import os
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvloop
from rich.console import Console

from shared import logs, settings
from shared.errors import ConfigError
from worker.config import WorkerConfig


class Style(StrEnum):
    """How a report is printed."""

    TEXT = "text"
    JSON = "json"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EPILOG = "Example: headwater worker --model smollm2 --port 8100 --kv-blocks 512 --threads 1"


@app.command(epilog=EPILOG)
def worker(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file; flags win over it.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Directory, hub id or GGUF file; 'smollm2', or 'fake' without torch."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address of the public listener.")] = None,
    port: Annotated[int | None, typer.Option(help="Its port; 0 takes a free one.")] = None,
    admin_host: Annotated[str | None, typer.Option(help="Address of the admin listener.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Port of the admin listener.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name to answer to; may be repeated.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda:0.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16, float16 or float64.")
    ] = None,
    quantize: Annotated[str | None, typer.Option(help="none or int8.")] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="KV blocks; 0 takes what fits.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block.")] = None,
    host_blocks: Annotated[
        int | None, typer.Option(help="Blocks of host memory for evicted KV; 0 = no second tier.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + answer.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Token budget of a step.")] = None,
    max_step_ms: Annotated[float | None, typer.Option(help="Time budget of a step.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Sequences that run at once.")] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="Adapter to load, NAME=DIR; may be repeated.")
    ] = None,
    max_loras: Annotated[int | None, typer.Option(help="Adapters served at once.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    pin: Annotated[str | None, typer.Option(help="Cores of those threads: 0-3,8.")] = None,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt anew.")
    ] = False,
    redis: Annotated[str | None, typer.Option(help="Redis URL, or 'none'.")] = None,
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="Measure the model here and leave; no server.")
    ] = False,
    style: Annotated[
        Style | None, typer.Option("--format", help="Of --benchmark's report.")
    ] = None,
) -> None:
    """Serve one model: OpenAI-compatible, with automatic prefix reuse."""
    flags: dict[str, Any] = {
        "model.path": model,
        "model.served_names": served_model_name or None,
        "model.device": device,
        "model.dtype": dtype,
        "model.quantize": quantize,
        "model.max_model_len": max_model_len,
        "model.threads": threads,
        "model.pin": pin,
        "model.lora_modules": lora or None,
        "model.max_loras": max_loras,
        "serve.host": host,
        "serve.port": port,
        "serve.admin_host": admin_host,
        "serve.admin_port": admin_port,
        "cache.kv_blocks": kv_blocks,
        "cache.block_size": block_size,
        "cache.host_blocks": host_blocks,
        "cache.prefix_cache": False if no_prefix_cache else None,
        "schedule.max_batch_tokens": max_batch_tokens,
        "schedule.max_step_ms": max_step_ms,
        "schedule.max_running": max_running,
        "redis.url": redis,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    loaded = settings.load(WorkerConfig, file=config, env=os.environ, flags=given)
    logs.configure(loaded.log)
    if benchmark:
        run_benchmark(loaded, style or Style.TEXT)
    elif style is not None:
        raise ConfigError("--format", style.value, "only --benchmark has a report")
    else:
        raise typer.Exit(serve(loaded))


def run_benchmark(config: WorkerConfig, style: Style) -> None:
    """Print rates of the configured model. Raises ``ConfigError``."""
    from worker.build import FAKE, check_model, limit_threads

    path = config.model.path
    if path == FAKE:
        reason = "has the speed of its settings; --benchmark measures a real model"
        raise ConfigError("model.path", path, reason)
    check_model(config.model)
    limit_threads(config.model.threads, os.environ)
    from worker.benchmark import render
    from worker.model.measure import benchmark

    report = benchmark(config, partial(typer.echo, err=True))
    if style is Style.JSON:
        typer.echo(msgspec.json.encode(report))
    else:
        render(report, Console())


def serve(config: WorkerConfig) -> int:
    """Run one worker until it is told to leave; returns the exit code."""
    from worker.build import load_model
    from worker.server import WorkerServer, announce

    # on stdout, where `headwater up` reads it and tells it the user
    load = partial(load_model, progress=announce)

    async def run() -> tuple[int, bool]:
        server = WorkerServer(config, load=load, announce=announce)
        return await server.run(), server.loading

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code, loading = runner.run(run())
    if loading:
        # Native code in that thread would be torn down under its feet, which aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
