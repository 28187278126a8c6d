"""What a request costs from the bytes of a client's connection to its answer, without a network.

    python -P bench/wire.py [--requests 4000] [--bytes 100] [--chunks 0] [--profile calls]

The whole gateway as it is built for ``headwater gateway`` (metrics, ledger, limits, access log),
with two connections' transports replaced by lists: one that sends requests, one that answers as a
worker does. What is left out is the kernel's and the event loop's part in reading and writing.

Prints microseconds of CPU a request (a chunk, with ``--chunks``), the median of ``--rounds``, and
how many functions were called for each (Python's own and those in C), which no other work on the
machine changes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import os
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import uvloop  # noqa: E402

from gateway.build import Gateway  # noqa: E402
from gateway.cli.serve import COLLECT  # noqa: E402
from gateway.config import GatewayConfig, LedgerConfig  # noqa: E402
from gateway.wire.connection import Connection  # noqa: E402
from gateway.wire.served import ServerConnection  # noqa: E402
from shared.load import WorkerInfo  # noqa: E402
from shared.logs import configure  # noqa: E402
from shared.types import Epoch, WorkerId  # noqa: E402

CLIENTS = 16
_WHOLE = msgspec.json.encode(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "mock-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "word " * 12},
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 16,
            "completion_tokens": 12,
            "total_tokens": 28,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
)
_HEAD = b"HTTP/1.1 200 OK\r\nServer: stand-in\r\nDate: Mon, 01 Jan 2024 00:00:00 GMT\r\n"


def _event(delta: dict[str, Any], reason: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "mock-model",
        "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
    }
    event = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


class Transport(asyncio.Transport):
    """Tells what is written to it."""

    def __init__(self, told: Callable[[bytes], object]) -> None:
        super().__init__()
        self._told = told

    def write(self, data: Any) -> None:
        """See :class:`asyncio.Transport`."""
        self._told(data)

    def writelines(self, list_of_data: Any) -> None:
        """See :class:`asyncio.Transport`."""
        self._told(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        """Everything has left."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever held."""

    def pause_reading(self) -> None:
        """Never needed."""

    def resume_reading(self) -> None:
        """Never needed."""

    def abort(self) -> None:
        """Never needed."""

    def close(self) -> None:
        """Never needed."""


class Bench:
    """One gateway, its clients and its workers."""

    def __init__(self, folder: str, texts: list[bytes], chunks: int) -> None:
        config = GatewayConfig(ledger=LedgerConfig(dir=folder))
        self._gateway = Gateway(config)
        self._loop = asyncio.get_running_loop()
        self._texts, self._chunks = texts, chunks
        self._left = self._sent = 0
        self._over = asyncio.Event()
        self._body = [
            _event({"content": f"word{number}"}, None if number + 1 < chunks else "stop")
            for number in range(chunks)
        ]
        for name in ("a", "b"):
            info = WorkerInfo(
                id=WorkerId(name),
                epoch=Epoch(1),
                url=f"http://{name}:80",
                models=("mock-model",),
                engine="openai",
                event_feed=False,
            )
            self._gateway.router.join(info, time.monotonic())
        self._gateway.upstream.connect = self._worker  # type: ignore[attr-defined]
        self._clients = [self._client() for _ in range(CLIENTS)]

    async def _worker(self, origin: object, connect_s: float) -> Connection:
        """What connects to a worker finds one that answers at once."""
        connection = Connection(self._loop)

        def asked(data: bytes) -> None:
            self._loop.call_soon(self._answer, connection, 0)

        connection.connection_made(Transport(asked))
        return connection

    def _answer(self, connection: Connection, at: int) -> None:
        if not self._chunks:
            head = _HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            connection.data_received(head % len(_WHOLE) + _WHOLE)
            return
        if at == 0:
            head = _HEAD + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.data_received(head)
        if at < self._chunks:
            connection.data_received(self._body[at])
            self._loop.call_soon(self._answer, connection, at + 1)
        else:
            end = b"data: [DONE]\n\n"
            connection.data_received(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))

    def _client(self) -> ServerConnection:
        connection: ServerConnection = self._gateway._public()

        def answered(data: bytes) -> None:
            if not self._chunks or data.endswith(b"0\r\n\r\n"):
                self._loop.call_soon(self._ask, connection)

        connection.connection_made(Transport(answered))
        return connection

    def _ask(self, connection: ServerConnection) -> None:
        if self._left <= 0:
            self._left -= 1
            if self._left == -CLIENTS:
                self._over.set()
            return
        self._left -= 1
        self._sent += 1
        connection.data_received(self._texts[self._sent % len(self._texts)])

    async def run(self, requests: int) -> float:
        """CPU seconds for so many requests, those of the threads that write included."""
        self._left = requests
        self._over.clear()
        begun = time.process_time()
        for connection in self._clients:
            self._ask(connection)
        await self._over.wait()
        return time.process_time() - begun

    async def close(self) -> None:
        """Stop writing."""
        await self._gateway.close()


def requests_of(size: int, *, stream: bool) -> list[bytes]:
    """Distinct chats of one message each, as they come in."""
    rng = random.Random(7)
    made = []
    for _ in range(64 if size > 4096 else 256):
        hexes = f"{rng.getrandbits(4 * size):0{size}x}"
        text = " ".join(hexes[at : at + 7] for at in range(0, size, 7))[:size]
        fields = {
            "model": "mock-model",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 12,
            "temperature": 0,
            "stream": stream,
        }
        body = msgspec.json.encode(fields)
        made.append(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nAuthorization: Bearer sk-none\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
    return made


def show(profiler: cProfile.Profile, requests: int, order: str) -> None:
    """Calls for each request, by file and by function."""
    stats: Any = pstats.Stats(profiler)
    rows: list[tuple[float, float, str]] = []
    files = Counter[str]()
    for (file, line, name), row in stats.stats.items():
        short = file.removeprefix(f"{ROOT}/").split("/python3.11/")[-1]
        rows.append((row[1] / requests, row[2] / requests * 1e6, f"{short}:{line} {name}"))
        if file != "~":
            files[short] += row[1]
            continue
        for caller, times in row[4].items():
            files[caller[0].removeprefix(f"{ROOT}/").split("/python3.11/")[-1]] += times[0]
    print(f"calls\t{sum(row[0] for row in rows):.1f}")
    if order:
        for short, calls in files.most_common(60):
            print(f"{calls / requests:8.1f}  {short}")
        rows.sort(key=lambda row: row[0 if order == "calls" else 1], reverse=True)
        for calls_each, micros, name in rows[:120]:
            print(f"{calls_each:8.2f} calls {micros:8.2f} us  {name}")


async def measure(options: argparse.Namespace) -> None:
    """One table."""
    per = options.requests * max(1, options.chunks)
    texts = requests_of(options.bytes, stream=bool(options.chunks))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, texts, options.chunks)
        await bench.run(2 * len(texts))
        spent = [await bench.run(options.requests) for _ in range(options.rounds)]
        profiler = cProfile.Profile()
        profiler.enable()
        await bench.run(options.requests)
        profiler.disable()
        await bench.close()
    print(f"us\t{statistics.median(spent) / per * 1e6:.1f}\tlowest\t{min(spent) / per * 1e6:.1f}")
    show(profiler, per, options.profile)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=100)
    parser.add_argument("--chunks", type=int, default=0)
    parser.add_argument("--profile", default="", choices=("", "calls", "time"))
    options = parser.parse_args()
    with open(os.devnull, "w") as nowhere:
        told, sys.stderr = sys.stderr, nowhere
        from shared.settings import LogConfig

        configure(LogConfig())
        sys.stderr = told
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            gc.freeze()
            gc.set_threshold(*COLLECT)
            runner.run(measure(options))


if __name__ == "__main__":
    main()
