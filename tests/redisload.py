"""What the Redis cases share: gateways that follow R, steady requests, where prompts are."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from caserig import settles
from conftest import WorkerProcess
from rig import CHAT, RawClient, Reply, ask
from stopwatch import Stopwatch

from gateway.index.table import PrefixTable


def text(seed: object, n: int = 600) -> str:
    """A fixed pseudo-random prompt."""
    return "".join(random.Random(str(seed)).choices("abcdefghijklmnop qrstuvwxyz", k=n))


def body(seed: object, model: str = "fake", n: int = 600, **more: Any) -> dict[str, Any]:
    """A short chat about :func:`text`."""
    message = {"role": "user", "content": text(seed, n)}
    return {"model": model, "messages": [message], "max_tokens": 2, "temperature": 0, **more}


def placed(reply: Reply) -> tuple[str, int, int]:
    """Worker, predicted and reported reuse of an answer."""
    assert reply.status == 200, reply.body
    cached = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    matched = int(reply.header("x-headwater-matched-tokens") or 0)
    return reply.header("x-headwater-worker") or "", matched, cached


async def warm(url: str, seeds: list[Any], model: str = "fake", n: int = 600) -> dict[Any, str]:
    """Send each prompt once, all at the same time, so that they spread; where each went."""
    replies = await asyncio.gather(*(ask(url, CHAT, body(seed, model, n)) for seed in seeds))
    return {seed: placed(reply)[0] for seed, reply in zip(seeds, replies, strict=True)}


def exact(served: Any, n: int, reason: str = "redis") -> Callable[[], bool]:
    """Whether ``n`` workers are ready and their events flow, by that road."""

    def check() -> bool:
        workers = served.gateway.router.workers(time.monotonic())
        good = [w for w in workers if str(w.trust) == "exact" and reason in w.trust_reason]
        return len(good) == len(workers) == n

    return check


def redis_up(served: Any) -> bool:
    """Whether the gateway uses Redis now."""
    return bool(served.gateway.feeds.stats.redis_up)


@dataclass
class Load:
    """Requests at a steady rate, and what became of them."""

    replies: list[Reply] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def check(self) -> None:
        """None failed."""
        assert not self.failures, self.failures[:3]
        bad = [reply for reply in self.replies if reply.status != 200]
        assert not bad, (bad[0].status, bad[0].body)

    def percentile(self, share: float, since: int = 0) -> float:
        """Seconds that this share of the requests after the first ``since`` stayed below."""
        ordered = sorted(self.seconds[since:])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@asynccontextmanager
async def load(
    url: str, make: Callable[[int], dict[str, Any]], per_s: float = 40.0
) -> AsyncIterator[Load]:
    """Requests all the while, each on time whatever the others do."""
    result, running = Load(), set()

    async def one(number: int) -> None:
        begun = Stopwatch()
        try:
            reply = await ask(url, CHAT, make(number))
        except Exception as error:
            result.failures.append(error)
        else:
            result.replies.append(reply)
            result.seconds.append(begun.seconds())

    async def drive() -> None:
        number = 0
        while True:
            task = asyncio.create_task(one(number))
            running.add(task)
            task.add_done_callback(running.discard)
            number += 1
            await asyncio.sleep(1 / per_s)

    driver = asyncio.create_task(drive())
    try:
        yield result
    finally:
        driver.cancel()
        await asyncio.gather(*running)


async def leave_after(url: str, seed: Any, after_s: float) -> None:
    """A client that sends a prompt and goes away."""
    client = await RawClient.connect(url)
    try:
        await client.send("POST", CHAT, json.dumps(body(seed, n=100)).encode())
        await asyncio.sleep(after_s)
    finally:
        client.abort()


async def await_known(
    served: Any,
    seed: Any,
    worker: str,
    within_s: float = 10.0,
    *,
    tokens: int = 256,
    **fields: Any,
) -> None:
    """Return once a gateway believes that this worker holds so much of the prompt.

    :param fields: other fields of its :func:`body`.
    """
    asked = body(seed, **fields)

    async def held() -> bool:
        answer = await ask(served.admin, "/admin/explain", asked)
        assert answer.status == 200, answer.body
        known = {w["id"]: w["matched_tokens"] for w in answer.json["workers"]}
        return bool(known.get(worker, 0) >= tokens)

    await settles(held, within_s, 0.05)


async def await_in_step(index: PrefixTable, worker: WorkerProcess, within_s: float = 10.0) -> None:
    """Return once a gateway's index has all that a worker has told of its cache so far."""

    async def all_read() -> bool:
        cache = (await ask(worker.admin_url, "/admin/cache")).json
        read = index.position(cache["worker"])
        return bool(read == (cache["epoch"], cache["seq"]))

    await settles(all_read, within_s, 0.05)


async def await_quiet(served: Any, within_s: float = 10.0) -> None:
    """Return once each worker has told that it does nothing, since this was called, and the gateway
    knows of no work that another one has booked there."""
    begun = time.monotonic()

    async def quiet() -> bool:
        now = time.monotonic()
        workers = served.gateway.router.workers(now)
        if not all(
            w.load_age_s is not None
            and w.load_age_s < now - begun
            and w.running == w.waiting == w.inflight == 0
            for w in workers
        ):
            return False
        answer = await ask(served.admin, "/admin/explain", body("nothing known"))
        return not any(w["parts"].get("wait") for w in answer.json["workers"])

    await settles(quiet, within_s, 0.05)
