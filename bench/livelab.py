"""A cluster of processes with fake workers, and conversations sent to it at a steady rate.

Shared by ``bench/redis_faults.py`` and ``bench/gateways.py``. The processes are started by the
same rigs that the tests use.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import aiohttp  # noqa: E402
from caserig import GatewayLauncher, GatewayProcess  # noqa: E402
from conftest import RedisServer, WorkerLauncher, WorkerProcess, pick_port  # noqa: E402

SPEED = {
    "HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "10",
    "HEADWATER_FAKE__DECODE_MS_PER_STEP": "1",
    "HEADWATER_CACHE__KV_BLOCKS": "16384",
}


@dataclass
class Lab:
    """What runs."""

    folder: Path
    redis: RedisServer
    workers: list[WorkerProcess]
    launch_gateway: GatewayLauncher

    def gateway(self, redis_url: str | None = None) -> GatewayProcess:
        """One more gateway; returns when the workers' events flow."""
        made = self.launch_gateway(redis=redis_url or self.redis.url)
        made.await_exact(len(self.workers), 60)
        return made


@asynccontextmanager
async def lab(
    n_workers: int,
    redis_url: Callable[[RedisServer], str],
    speed: Mapping[str, str] | None = None,
) -> AsyncIterator[Lab]:
    """Redis and fake workers that publish to ``redis_url(server)``; ``speed``: of their own."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = RedisServer("newest", folder)
        server.start()
        stack.callback(server.stop)
        workers = WorkerLauncher(folder)
        stack.callback(workers.end)
        for _ in range(n_workers):
            workers("--redis", redis_url(server), env={**SPEED, **(speed or {})}, wait=False)
        for worker in workers.workers:
            worker.await_ready()
        gateways = GatewayLauncher(folder, pick_port)
        stack.callback(gateways.end)
        yield Lab(folder, server, workers.workers, gateways)


@dataclass
class Answer:
    """One request."""

    at: float
    """Monotonic seconds when it was sent."""
    seconds: float
    worker: str
    prompt: int
    cached: int
    error: str = ""


@dataclass
class Traffic:
    """Conversations of about 1,500 to 6,000 tokens, each asked again and again with a new end."""

    urls: Sequence[str]
    per_s: float
    conversations: int = 48
    seed: int = 1
    answers: list[Answer] = field(default_factory=list)
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    def body(self, number: int, rng: random.Random) -> dict[str, Any]:
        """A request of one conversation."""
        fixed = random.Random(f"{self.seed} {number}")
        shared = "".join(
            fixed.choices("abcdefghijklmnop qrstuvwxyz", k=fixed.randrange(1500, 6000))
        )
        text = f"{shared} {rng.getrandbits(64)}"
        return {
            "model": "fake",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "temperature": 0,
        }

    async def warm(self) -> None:
        """Each conversation once, one after the other; not counted."""
        rng = random.Random(0)
        async with aiohttp.ClientSession() as session:
            for number in range(self.conversations):
                url = self.urls[number % len(self.urls)]
                await self._one(session, url, self.body(number, rng))
        self.answers.clear()

    async def run(self, seconds: float) -> None:
        """Send for so long, at random moments, in turn to the gateways; wait for all answers."""
        rng = random.Random(self.seed)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            begun = due = time.monotonic()
            number = 0
            while due < begun + seconds:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                url = self.urls[number % len(self.urls)]
                body = self.body(rng.randrange(self.conversations), rng)
                task = asyncio.create_task(self._one(session, url, body))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                number += 1
                due += rng.expovariate(self.per_s)
            await asyncio.gather(*self._running)

    async def _one(self, session: aiohttp.ClientSession, url: str, body: Any) -> None:
        at = time.monotonic()
        try:
            async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
                value = await reply.json()
                if reply.status != 200:
                    raise ValueError(f"{reply.status}: {value}")
            usage = value["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            worker = reply.headers["x-headwater-worker"]
            took = time.monotonic() - at
            self.answers.append(Answer(at, took, worker, usage["prompt_tokens"], cached))
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            self.answers.append(Answer(at, time.monotonic() - at, "", 0, 0, repr(error)[:200]))


def hit_rate(answers: Sequence[Answer]) -> float:
    """Reported cached tokens of all prompt tokens."""
    return sum(a.cached for a in answers) / max(1, sum(a.prompt for a in answers))


def errors(answers: Sequence[Answer]) -> list[str]:
    """Of those that failed."""
    return [a.error for a in answers if a.error]
