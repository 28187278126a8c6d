"""B09 and C05, with a gateway that stood still: what it missed, and what is gone from the log by
then, it knows soon after it goes on; nobody's requests fail meanwhile."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from caserig import GatewayLauncher, wait_until
from conftest import RedisServer, WorkerLauncher
from redisload import await_known, body, exact, placed, warm
from redisrig import talk
from rig import CHAT, ask, eventually

pytestmark = pytest.mark.redis
SMALL = {"HEADWATER_CACHE__KV_BLOCKS": "600"}
"""About 15 of the prompts: what is warmed later pushes out what was warmed before."""
FROZEN_S = 4.0
"""Longer than a worker's lease."""


async def test_a_gateway_that_stood_still(
    serve, worker_process: WorkerLauncher, gateway_process: GatewayLauncher, redis_server_factory
) -> None:
    server: RedisServer = redis_server_factory("newest")
    workers = [worker_process("--redis", server.url, env=SMALL, wait=False) for _ in range(2)]
    for worker in workers:
        await asyncio.to_thread(worker.await_ready)
    patient = {"redis.url": server.url, "redis.timeout_ms": 10_000}
    one = await serve(wait=False, **patient)
    two = await asyncio.to_thread(gateway_process, redis=server.url)
    await eventually(exact(one, 2), 60)
    await asyncio.to_thread(two.await_exact, 2, 60.0)
    early = [f"still {n}" for n in range(12)]
    before = await warm(one.url, early)
    await asyncio.to_thread(wait_until, lambda: knows(two, early[-1], before[early[-1]]))

    two.process.send_signal(signal.SIGSTOP)
    try:
        late = [f"meanwhile {n}" for n in range(24)]
        after = await warm(one.url, late)
        for shard in range(16):
            talk(server.port, "DEL", f"hw:{{headwater.{shard}}}:log")
        await asyncio.sleep(FROZEN_S)
    finally:
        two.process.send_signal(signal.SIGCONT)

    await asyncio.to_thread(two.await_exact, 2, 30.0)
    for seed in late[-4:]:
        await await_known(one, seed, after[seed], 30)
        await asyncio.to_thread(wait_until, lambda s=seed: knows(two, s, after[s]), 30.0)
    for seed in (*late[-4:], *early[:2]):
        await asyncio.to_thread(await_settled, two, seed)
        _, matched, cached = placed(await ask(two.url, CHAT, body(seed)))
        assert abs(matched - cached) <= 16, seed


def knows(gateway, seed: str, worker: str) -> bool:
    """Whether a gateway believes that this worker holds most of the prompt."""
    return gateway.explain(body(seed)).get(worker, 0) >= 256


def await_settled(gateway, seed: str) -> None:
    """Until a gateway believes the same as half a second before: each prompt that is served pushes
    out others, of which the gateway hears a moment later."""
    before, now = None, gateway.explain(body(seed))
    while before != now:
        time.sleep(0.5)
        before, now = now, gateway.explain(body(seed))
