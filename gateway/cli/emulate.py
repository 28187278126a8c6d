"""``headwater emulate``: a stand-in for an engine of another make, without model and GPU."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.bundle import TokenizerBundle

ENGINES = ("vllm", "sglang", "llamacpp", "tgi")
FORMS = ("map", "array")

app = typer.Typer()


@app.command(
    epilog="Example: headwater emulate vllm --port 8200 --event-port 5557 --replay-port 5558   |   "
    "headwater gateway --workers http://127.0.0.1:8200"
)
def emulate(
    engine: Annotated[str, typer.Argument(help=f"One of {', '.join(ENGINES)}.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port; 0 takes a free one.")] = 8200,
    model: Annotated[str, typer.Option(help="Name of the model.")] = "emulated",
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id of a tokenizer; default: one byte a token.")
    ] = None,
    save_tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder to write its tokenizer to, for \\[render] tokenizers."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block or page.")] = 16,
    blocks: Annotated[int, typer.Option(help="Blocks of KV memory.")] = 4096,
    prefill_us: Annotated[float, typer.Option(help="Microseconds per prompt token.")] = 50.0,
    decode_ms: Annotated[float, typer.Option(help="Milliseconds per output token.")] = 5.0,
    event_port: Annotated[
        int, typer.Option(help="Port of its cache events; 0 takes a free one, -1 publishes none.")
    ] = 0,
    replay_port: Annotated[
        int, typer.Option(help="Port of their replay; 0 takes a free one, -1: there is none.")
    ] = 0,
    form: Annotated[
        str, typer.Option(help="Encoding of events: map, or array as older releases have it.")
    ] = "map",
) -> None:
    """Speak an engine's HTTP, metrics and cache events over a real block pool."""
    for key, value, known in (("engine", engine, ENGINES), ("form", form, FORMS)):
        if value not in known:
            raise ConfigError(key, value, f"must be one of {', '.join(known)}")
    if block_size < 1 or blocks < 1:
        raise ConfigError("blocks", f"{blocks} of {block_size} tokens", "must be at least 1")
    from gateway.emulators import Emulator, Settings
    from shared.bundle import load_bundle
    from shared.bytetok import byte_bundle

    settings = Settings(
        engine=engine,
        model=model,
        block_size=block_size,
        blocks=blocks,
        prefill_us=prefill_us,
        decode_ms=decode_ms,
        events=event_port >= 0,
        form=form,
        event_port=max(0, event_port),
        replay=replay_port >= 0,
        replay_port=max(0, replay_port),
    )
    bundle = byte_bundle() if tokenizer is None else load_bundle(tokenizer)
    if save_tokenizer is not None:
        _save(bundle, save_tokenizer)

    async def serve() -> None:
        emulator = Emulator(settings, bundle)
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        try:
            await emulator.start(port, host)
        except OSError as error:
            raise ConfigError("port", port, error.strerror or "cannot be listened on") from error
        line = f"ready http://{host}:{emulator.port}"
        if emulator.publisher is not None:
            publisher = emulator.publisher
            line += f" events tcp://127.0.0.1:{publisher.port}"
            line += f" replay tcp://127.0.0.1:{publisher.replay_port}" * bool(publisher.replay_port)
        typer.echo(line)
        await ended.wait()
        await emulator.stop()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


def _save(bundle: TokenizerBundle, folder: Path) -> None:
    from gateway.emulators.tokenizerfiles import write_tokenizer

    try:
        write_tokenizer(bundle, folder)
    except OSError as error:
        reason = error.strerror or "cannot be written"
        raise ConfigError("save-tokenizer", str(folder), reason) from error
