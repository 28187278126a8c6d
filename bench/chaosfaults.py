"""The faults of ``bench/chaos.py``: each breaks something for a while and mends it."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]

from caserig import GatewayProcess  # noqa: E402
from chaoslab import CHAT, body_of, read, start_again  # noqa: E402
from livelab import Lab  # noqa: E402
from redisrig import talk  # noqa: E402
from rig import (  # noqa: E402
    CUT,
    END,
    ROLE,
    SSE_HEAD,
    Script,
    Seen,
    Stub,
    answer,
    chunk,
    completion,
    delta,
    plain,
    stream,
    usage_event,
)

HOLD_S = 4.0
LIES = (
    answer({"error": {"message": "an error in a 200"}}),
    plain(b"<html>", 200, ("Content-Type", "application/json")),
    [SSE_HEAD, chunk(ROLE + delta("a") + b"data: {not json\n\n"), END],
    [SSE_HEAD, chunk(b"data: " + b"x" * 100_000), CUT],
    [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello"],
    [b"nonsense\r\n\r\n"],
    completion(usage={"prompt_tokens": -5, "completion_tokens": "x", "total_tokens": None}),
    [SSE_HEAD, chunk(ROLE + delta("a")), 0.2, CUT],
    answer({"error": {"message": "busy"}}, 503),
)


def good(seen: Seen) -> Script:
    """What the liar says while it is honest."""
    return stream(delta("ok"), usage_event()) if seen.json.get("stream") else completion()


@dataclass
class Chaos:
    """The cluster, and what is broken now."""

    bench: Lab
    gateway: GatewayProcess
    liar: Stub
    rng: random.Random
    made_up: int = 0
    """Requests that nobody waits for to the end."""
    now: str = ""
    until: float = 0.0
    open: list[asyncio.StreamWriter] = field(default_factory=list)

    def excused(self, stream: bool, outcome: str) -> bool:
        """A worker that dies in an answer cuts it; one that is silent or lies may, too."""
        if time.monotonic() > self.until or self.now not in UNANSWERABLE:
            return False
        return stream or self.now != "kill"

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection to the gateway."""
        place = urlsplit(self.gateway.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=4096)
        self.open.append(writer)
        return reader, writer

    async def ask(
        self, tokens: int, *, stream: bool = True
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request on a connection of its own."""
        reader, writer = await self.dial()
        body = json.dumps(body_of(self.rng, stream=stream, tokens=tokens)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.made_up += 1
        return reader, writer

    def hang_up(self) -> None:
        """All raw connections are cut."""
        for writer in self.open:
            writer.transport.abort()
        self.open.clear()


async def kill(at: Chaos) -> None:
    """A worker dies with its answers, and is started again."""
    worker = at.rng.choice(at.bench.workers)
    worker.process.kill()
    await asyncio.to_thread(worker.process.wait)
    await asyncio.sleep(HOLD_S / 2)
    start_again(at.bench, worker)


async def flap(at: Chaos) -> None:
    """A worker comes and goes: its port is there, then not, five times."""
    for _ in range(5):
        await at.liar.stop()
        await asyncio.sleep(HOLD_S / 10)
        await at.liar.listen()
        await asyncio.sleep(HOLD_S / 10)


async def freeze(at: Chaos) -> None:
    """A worker keeps its sockets and says nothing."""
    worker = at.rng.choice(at.bench.workers)
    worker.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(HOLD_S)
    worker.process.send_signal(signal.SIGCONT)


async def slow(at: Chaos) -> None:
    """A worker takes its time for each byte."""
    at.liar.respond = lambda seen: [1.5, *good(seen)]
    await asyncio.sleep(HOLD_S)
    at.liar.respond = good


async def lie(at: Chaos) -> None:
    """A worker answers what no engine should."""
    at.liar.respond = lambda seen: at.rng.choice(LIES)
    await asyncio.sleep(HOLD_S)
    at.liar.respond = good


async def redis_killed(at: Chaos) -> None:
    """It dies, and comes back empty."""
    assert at.bench.redis.process is not None
    at.bench.redis.process.kill()
    await asyncio.to_thread(at.bench.redis.process.wait)
    await asyncio.sleep(HOLD_S)
    await asyncio.to_thread(at.bench.redis.start)


async def redis_frozen(at: Chaos) -> None:
    """It keeps its sockets and says nothing."""
    at.bench.redis.freeze()
    await asyncio.sleep(HOLD_S)
    at.bench.redis.thaw()


async def redis_flushed(at: Chaos) -> None:
    """All keys are gone."""
    await asyncio.to_thread(talk, at.bench.redis.port, "FLUSHALL")
    await asyncio.sleep(HOLD_S / 2)


async def leavers(at: Chaos) -> None:
    """Clients that leave at any point of a request or an answer."""
    for number in range(40):
        reader, writer = await at.ask(200, stream=number % 2 == 0)
        if number % 4 == 0:
            await reader.read(at.rng.choice((1, 200, 2000)))
        await asyncio.sleep(at.rng.random() * HOLD_S / 40)
        writer.transport.abort()


async def slow_readers(at: Chaos) -> None:
    """Clients that ask for long answers and read nothing."""
    for _ in range(20):
        await at.ask(1500)
    await asyncio.sleep(HOLD_S)
    at.hang_up()


async def half_open(at: Chaos) -> None:
    """Half heads, half bodies, half-closed connections, requests one behind the other."""
    for number in range(40):
        _, writer = await at.dial()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\n")
        if number % 4 == 1:
            writer.write(b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
        elif number % 4 == 2:
            writer.write_eof()
        elif number % 4 == 3:
            writer.write(b"\r\n" + b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n" * 30)
    await asyncio.sleep(HOLD_S)
    at.hang_up()


async def idle(at: Chaos) -> None:
    """Four hundred connections on which nothing is said."""
    for _ in range(400):
        await at.dial()
    await asyncio.sleep(HOLD_S)
    at.hang_up()


async def limited(at: Chaos, kind: int, least: int) -> None:
    pid = at.gateway.process.pid
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (least, before[1]))
    await asyncio.sleep(HOLD_S)
    resource.prlimit(pid, kind, before)


async def no_files(at: Chaos) -> None:
    """Hardly a file descriptor is left, and clients go on connecting."""
    least = read(at.gateway).fds + 8
    crowd = asyncio.create_task(limited(at, resource.RLIMIT_NOFILE, least))
    await asyncio.sleep(0.1)
    for _ in range(12):
        with suppress(OSError):
            await at.dial()
    await asyncio.sleep(HOLD_S / 2)
    at.hang_up()
    await crowd


async def disk_full(at: Chaos) -> None:
    """No file of the gateway grows any more: its ledger, its log."""
    await limited(at, resource.RLIMIT_FSIZE, 1)


Fault = Callable[[Chaos], Awaitable[None]]
FAULTS: dict[str, Fault] = {
    "kill": kill,
    "flap": flap,
    "freeze": freeze,
    "slow": slow,
    "lie": lie,
    "redis killed": redis_killed,
    "redis frozen": redis_frozen,
    "redis flushed": redis_flushed,
    "leavers": leavers,
    "slow readers": slow_readers,
    "half open": half_open,
    "idle": idle,
    "no files": no_files,
    "disk full": disk_full,
}
UNANSWERABLE = {"kill", "flap", "freeze", "lie", "no files"}
"""While these are on, an error that is told may be all that can be done."""
