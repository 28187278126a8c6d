"""What ``bench/chaos.py`` and ``bench/soak.py`` share: a cluster, its load, and what may not leak.

A request is *answered* (200, whole), *told* (a JSON error, or an error event in a stream that had
begun) or *lost* (anything else: cut, no answer, half an answer that looks whole). Told is enough
only while a fault is on that makes an answer impossible; else it counts as lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]

import aiohttp  # noqa: E402
import psutil  # noqa: E402
from caserig import GatewayProcess  # noqa: E402
from conftest import FAST_FAKE, WorkerProcess  # noqa: E402
from livelab import SPEED, Lab  # noqa: E402

CHAT = "/v1/chat/completions"
CLIENT_LIMIT_S = 60.0
SILENCE_S = 10.0
SILENCE = {"HEADWATER_WORKERS__IDLE_TIMEOUT_S": str(SILENCE_S)}
"""Where workers fall silent for good, so that their requests end in time. Elsewhere it would cut
answers of workers that are merely busy: one that is no stream says nothing until it is whole."""
PATIENT = {
    "HEADWATER_WORKERS__HEALTH_TIMEOUT_S": "3",
    "HEADWATER_LOG__LEVEL": "warning",
}


LENGTHS = (2, 12, 60, 600)


def body_of(rng: random.Random, *, stream: bool, tokens: int = 0) -> dict[str, Any]:
    """One of forty conversations with a new end; the answer's length is drawn if none is given."""
    shared = f"conversation {rng.randrange(40)} " * 60
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": f"{shared} {rng.getrandbits(64)}"}],
        "max_tokens": tokens or rng.choice(LENGTHS),
        "ignore_eos": True,
        "stream": stream,
    }


def verdict(status: int, data: bytes, *, stream: bool) -> str:
    """``ok``, ``told: ...`` or ``lost: ...`` of an answer that was whole on the wire. Pure."""
    if status != 200:
        try:
            return f"told: {status} {json.loads(data)['error']['message'][:80]}"
        except (ValueError, KeyError, TypeError):
            return f"lost: {status} without a JSON error"
    try:
        if not stream:
            return "ok" if json.loads(data)["choices"] else "lost: no choices"
        events = [line[5:].strip() for line in data.splitlines() if line.startswith(b"data:")]
        if events and events[-1] == b"[DONE]":
            return "ok"
        return f"told: {json.loads(events[-1])['error']['message'][:80]}"
    except (ValueError, KeyError, TypeError, IndexError):
        return f"lost: half an answer {data[-80:]!r}"


@dataclass
class Load:
    """Requests at a steady rate, half of them streams."""

    url: Callable[[], str]
    per_s: float
    excused: Callable[[bool, str], bool] = lambda stream, outcome: False
    """Whether a told error is enough now (streamed?, what was told)."""
    most: float = inf
    """Requests without an answer at a time; further ones are ``held`` until one has ended."""
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    ends: bool = False

    async def run(self) -> None:
        """Until ``ends``; then all answers are waited for."""
        rng = random.Random(11)
        limit = aiohttp.ClientTimeout(total=CLIENT_LIMIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
            running: set[asyncio.Task[None]] = set()
            while not self.ends:
                await asyncio.sleep(rng.expovariate(self.per_s))
                if len(running) >= self.most:
                    self.counts["held"] += 1
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.create_task(self._one(session, rng))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)

    async def _one(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        stream = rng.random() < 0.5
        self.counts["requests"] += 1
        name, begun = f"load-{self.counts['requests']}", time.monotonic()
        body = body_of(rng, stream=stream)
        begun_excused = self.excused(stream, "told: before")
        headers = {"x-request-id": name}
        try:
            async with session.post(f"{self.url()}{CHAT}", json=body, headers=headers) as got:
                outcome = verdict(got.status, await got.read(), stream=stream)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            outcome = f"lost: {error!r}"
        if outcome == "ok":
            self.counts["answered"] += 1
        elif outcome.startswith("told") and (begun_excused or self.excused(stream, outcome)):
            self.counts["told"] += 1
        else:
            self.counts["lost"] += 1
            kind, took = "stream" if stream else "whole", time.monotonic() - begun
            self.lost.append(f"{kind} {outcome} ({name}, {took:.1f} s, at {time.time():.1f})")


@dataclass(frozen=True)
class Reading:
    """What a gateway holds."""

    rss_mib: float
    fds: int
    inflight: float


def read(gateway: GatewayProcess) -> Reading:
    """Of a gateway now."""
    process = psutil.Process(gateway.process.pid)
    page = gateway.http.get(f"{gateway.admin}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("headwater_inflight{")]
    inflight = sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return Reading(process.memory_info().rss / 2**20, process.num_fds(), inflight)


def settled(gateway: GatewayProcess, n_workers: int) -> bool:
    """All workers are ready, and Redis is used."""
    ready = [w for w in gateway.workers() if w["state"] == "ready"]
    page = gateway.http.get(f"{gateway.admin}/metrics").text
    return len(ready) >= n_workers and "headwater_redis_up 1.0" in page


async def recovers(gateway: GatewayProcess, n_workers: int, limit_s: float = 45.0) -> float:
    """Seconds until :func:`settled`; ``limit_s`` if it never is."""
    begun = time.monotonic()
    while time.monotonic() - begun < limit_s:
        if await asyncio.to_thread(settled, gateway, n_workers):
            return time.monotonic() - begun
        await asyncio.sleep(0.1)
    return limit_s


def start_again(bench: Lab, worker: WorkerProcess, speed: Mapping[str, str] | None = None) -> None:
    """The same command on the same ports; ``speed``: as the lab's."""
    with worker.stdout.open("ab") as out, worker.stderr.open("ab") as err:
        worker.process = subprocess.Popen(
            worker.process.args,
            stdout=out,
            stderr=err,
            env={**os.environ, **FAST_FAKE, **SPEED, **(speed or {})},
        )
