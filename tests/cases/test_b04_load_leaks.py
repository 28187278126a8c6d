"""B04: whatever way a client leaves, nothing stays counted.

300 aborts as in the case, each after at most 150 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from caserig import COMPLETIONS, Clogged, body_for, inflight, settles, shares_of
from dialoguekit import ROUTES, request
from rig import (
    CHAT,
    CUT,
    HANG,
    ROLE,
    SSE_HEAD,
    answer,
    ask,
    chat,
    chunk,
    completion,
    cut_stream,
    delta,
    eventually,
    plain,
)

CALM: dict[str, list[Any]] = {
    "before the head": [HANG],
    "late head": [0.05, SSE_HEAD, chunk(ROLE), *[chunk(delta("x")), 0.01] * 200],
    "before content": [SSE_HEAD, chunk(ROLE), HANG],
    "in mid-stream": [SSE_HEAD, chunk(ROLE), *[chunk(delta("x")), 0.01] * 200],
    "answered": completion(),
    "refused": answer({"error": {"message": "no", "type": "t"}}, 400),
}
FAILING: dict[str, list[Any]] = {
    "retry after 500": plain(b"x", 500),
    "retry after a cut": [0.01, CUT],
    "retry after a role": cut_stream(ROLE),
    "broken": cut_stream(ROLE, delta("x")),
}
MOMENTS = {**CALM, **FAILING}


async def storm(served, dial, n: int = 300, at_once: int = 50, seed: int = 4) -> None:
    """``n`` requests of all kinds, each left at a random moment."""
    rng = random.Random(seed)

    async def one() -> None:
        client = await dial(served.url)
        path = rng.choice([CHAT, CHAT, COMPLETIONS, "/v1/embeddings", *ROUTES])
        stream = rng.random() < 0.7
        if path in ROUTES:
            body = request(path, [("user", f"{rng.random()}")], stream=stream)
        else:
            body = body_for(path, f"{rng.random()}", stream=stream)
        await client.send("POST", path, json.dumps(body).encode())
        await asyncio.sleep(rng.random() * 0.15)
        client.abort() if rng.random() < 0.5 else client.close()

    for _ in range(n // at_once):
        await asyncio.gather(*(one() for _ in range(at_once)))


async def all_zero(served) -> None:
    """All gauges are there, and 0 within 2 s."""

    async def so() -> bool:
        gauges = await inflight(served.admin)
        assert all(value >= 0 for value in gauges.values())
        return sorted(gauges) == sorted(stub.id for stub in served.stubs) and not any(
            gauges.values()
        )

    await settles(so, 2.0)


async def even(served, what: str) -> None:
    """40 new unique prompts are spread 10 +- 3."""
    shares = await shares_of(
        served.stubs, lambda n: ask(served.url, CHAT, chat(f"{n} {what} {n * 7919}")), 40
    )
    assert all(7 <= share <= 13 for share in shares), shares


@pytest.mark.parametrize("moment", MOMENTS)
async def test_left_at_one_kind_of_moment(stub, serve, dial, moment) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers:
        worker.plays(MOMENTS[moment])
    await storm(served, dial, n=50)
    await all_zero(served)
    for worker in workers:
        worker.plays(completion())
        await eventually(lambda w=worker: w.open_connections <= 60)


async def all_ready(served) -> None:
    """Nobody rests any more: a worker that failed too often does so for 5 s (documented)."""

    async def so() -> bool:
        listed = (await ask(served.admin, "/admin/workers")).json["workers"]
        return all(each["state"] == "ready" for each in listed)

    await settles(so, 20.0)


async def test_left_at_any_moment(stub, serve, dial) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    rng = random.Random(1)
    for worker in workers:
        worker.respond = lambda seen: rng.choice(list(CALM.values()))
    await storm(served, dial)
    await all_zero(served)
    await even(served, "after the storm")
    # A worker that was started again, and truly has nothing to do, is not preferred for it.
    await workers[1].stop()
    await asyncio.sleep(0.3)
    await workers[1].listen()
    await all_ready(served)
    await even(served, "after the restart")


async def test_left_during_a_retry(stub, serve, dial) -> None:
    """One answer in 20 fails, so that some clients leave while a second worker is tried."""
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    rng = random.Random(3)
    for worker in workers:
        worker.respond = lambda seen: rng.choice(
            list((FAILING if rng.random() < 0.05 else CALM).values())
        )
    await storm(served, dial)
    await all_zero(served)
    await all_ready(served)
    # Who rested is probed once, and failures make a worker dearer for some seconds.
    for turn in range(15):
        with contextlib.suppress(AssertionError):
            await even(served, f"after the storm, {turn}")
            return
        await asyncio.sleep(0.5)
    await even(served, "long after the storm")


async def test_left_while_the_gateway_connects(stub, serve, dial) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(
        *workers, **{"workers.connect_timeout_s": 5.0, "workers.health_timeout_s": 5.0}
    )
    for worker in workers:
        worker.plays(completion())
    # Probes go on over the connections they have; new ones hang.
    clogged = []
    for worker in workers:
        assert worker._server is not None
        worker._server.close()
        clogged.append(Clogged(worker.port))
    clients = [await dial(served.url) for _ in range(60)]
    for n, client in enumerate(clients):
        await client.send("POST", CHAT, json.dumps(chat(f"{n}", stream=n % 2 == 0)).encode())

    async def counted() -> bool:
        return sum((await inflight(served.admin)).values()) == 60

    await settles(counted, 2.0)
    assert sum(len(worker.seen) for worker in workers) == 0
    for client in clients:
        client.abort()
    await all_zero(served)
    for each in clogged:
        each.close()
    for worker in workers:
        await worker.listen()
    await even(served, "once they can be reached")


@contextlib.asynccontextmanager
async def stuttering(redis: Any) -> AsyncIterator[None]:
    """The Redis server stops and goes on at random while this is open."""
    rng = random.Random(8)

    async def stutter() -> None:
        while True:
            redis.freeze()
            await asyncio.sleep(rng.random() * 0.3)
            redis.thaw()
            await asyncio.sleep(rng.random() * 0.1)

    task = asyncio.create_task(stutter())
    try:
        yield
    finally:
        task.cancel()
        redis.thaw()


@pytest.mark.redis
async def test_left_while_redis_is_slow(stub, serve, dial, redis_server_factory) -> None:
    redis = redis_server_factory()
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers, **{"redis.url": redis.url})
    rng = random.Random(2)
    for worker in workers:
        worker.respond = lambda seen: rng.choice(list(CALM.values()))
    async with stuttering(redis):
        await storm(served, dial)
        await all_zero(served)
    await even(served, "after the slow time")


async def test_left_with_answers_that_nobody_reads(stub, serve, dial) -> None:
    workers = [await stub() for _ in range(2)]
    served = await serve(*workers)
    for worker in workers:
        worker.plays([SSE_HEAD, *[chunk(delta("y" * 60_000))] * 300, HANG])
    clients = [await dial(served.url) for _ in range(10)]
    for client in clients:
        await client.send("POST", CHAT, json.dumps(chat(stream=True)).encode())

    async def all_came() -> bool:
        return sum((await inflight(served.admin)).values()) == 10

    await settles(all_came, 20.0)
    for client in clients:
        client.abort()
    await all_zero(served)
