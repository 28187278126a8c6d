"""C04: connections to Redis are few and stay few, whatever clients and network do.

Scaled: 300 clients that leave; in addition, connections to Redis are cut all the while.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from redisload import await_known, await_quiet, exact, leave_after, placed, redis_up, warm
from redisload import body as prompt
from redisrig import RedisProxy, talk
from rig import CHAT, ask, eventually

pytestmark = pytest.mark.redis
MOST = 6
"""Links of one gateway."""


async def test_the_number_of_connections_is_bounded(serve, pair) -> None:
    rng = random.Random(4)
    proxied = RedisProxy(pair.redis.port)
    proxied.jitter = lambda: rng.random() * 0.05
    try:
        served = await serve(wait=False, **{"redis.url": proxied.url})
        await eventually(exact(served, 2), 20)
        seen = []
        for turn in range(10):
            await asyncio.gather(
                *(leave_after(served.url, f"C04 {turn} {n}", rng.random() * 0.1) for n in range(30))
            )
            seen.append(proxied.open_connections)
            if turn % 3 == 0:
                proxied.cut(lambda flow: rng.random() < 0.5)
        assert max(seen) <= MOST
        proxied.jitter = None
        await eventually(lambda: redis_up(served), 10)
        await eventually(exact(served, 2), 20)
        await asyncio.sleep(0.2)
        listed = str(talk(pair.redis.port, "CLIENT", "LIST"))
        assert 0 < listed.count("headwater-gateway") <= MOST
        # It is used again: what another gateway caused is known here.
        other = await serve(wait=False, **{"redis.url": pair.redis.url})
        await eventually(exact(other, 2), 20)
        truth = await warm(other.url, ["C04 a", "C04 b", "C04 c"])
        await await_quiet(served)
        for seed, worker in truth.items():
            await await_known(served, seed, worker)
            assert placed(await ask(served.url, CHAT, prompt(seed)))[:1] == (worker,)
    finally:
        proxied.close()
