"""What the measurements share: a cluster of its own on free ports, a client that takes times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

HEADWATER = str(Path(sys.executable).parent / "headwater")
WORDS = (
    "river stone cloud paper garden winter engine market silver bridge forest window letter "
    "harbor candle valley thunder copper meadow lantern orchard compass island desert mirror "
    "anchor castle feather granite jungle kettle ladder magnet needle ocean pepper quartz ribbon"
).split()


def prose(rng: random.Random, words: int) -> str:
    """Words without meaning, the same for the same seed."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def free_ports(count: int) -> int:
    """First of ``count`` consecutive free ports."""
    while True:
        first = random.randrange(20_000, 50_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


@dataclass
class Cluster:
    """A running ``headwater up``."""

    url: str
    admin_url: str
    worker_urls: list[str]
    model: str
    ledger: Path
    process: asyncio.subprocess.Process
    gateway_urls: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def cluster(
    *flags: str,
    workers: int,
    gateways: int = 1,
    env: dict[str, str] | None = None,
    ready_s: float = 300,
) -> AsyncIterator[Cluster]:
    """Start a cluster with its own ports and ledger; stopped on leaving."""
    port, worker_port = free_ports(10 * gateways + 2), free_ports(workers)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        process = await asyncio.create_subprocess_exec(
            *(HEADWATER, "up", "--workers", str(workers)),
            *("--port", str(port), "--worker-port", str(worker_port)),
            *("--gateways", str(gateways), *flags),
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "XDG_STATE_HOME": folder,
                "HEADWATER_LEDGER__DIR": f"{folder}/ledger",
                "HEADWATER_ROUTING__ALLOW_POLICY_HEADER": "true",
                **(env or {}),
            },
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(ready_s):
                while not (line := await process.stdout.readline()).startswith(b"ready "):
                    if not line:
                        raise RuntimeError("headwater up ended before it was ready")
            drain = asyncio.create_task(_drain(process.stdout))
            url = f"http://127.0.0.1:{port}"
            urls = [f"http://127.0.0.1:{worker_port + i}" for i in range(workers)]
            await _all_ready(urls)
            models = httpx.get(f"{url}/v1/models").json()["data"]
            yield Cluster(
                url,
                f"http://127.0.0.1:{port + 1}",
                urls,
                models[0]["id"],
                Path(folder) / "ledger",
                process,
                [f"http://127.0.0.1:{port + 10 * i}" for i in range(gateways)],
            )
            drain.cancel()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                await asyncio.wait_for(process.wait(), 60)


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


async def _all_ready(urls: list[str]) -> None:
    async with httpx.AsyncClient() as client:
        for url in urls:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{url}/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
    await asyncio.sleep(1.5)  # one health period, so that the gateway sees them all


@dataclass
class Answer:
    """One streamed chat as the client saw it. Times in seconds."""

    text: str
    worker: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int


async def ask(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    messages: list[dict[str, str]],
    *,
    max_tokens: int,
    policy: str | None = None,
) -> Answer:
    """A streamed greedy chat; TTFT is the time to the first content delta."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    headers = {"x-headwater-policy": policy} if policy else {}
    started = time.perf_counter()
    text, ttft, usage = "", 0.0, {}
    async with client.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers=headers
    ) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event))
            for choice in event["choices"]:
                if (piece := choice["delta"].get("content")) and not ttft:
                    ttft = time.perf_counter() - started
                text += piece or ""
            usage = event.get("usage") or usage
    return Answer(
        text,
        answer.headers.get("x-headwater-worker", ""),
        ttft,
        time.perf_counter() - started,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        int(answer.headers.get("x-headwater-matched-tokens", 0)),
    )
