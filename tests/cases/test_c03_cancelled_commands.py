"""C03: clients that leave at any moment never mix up what Redis answers to others.

Scaled: 150 that leave and 30 that stay.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from redisload import await_quiet, body, exact, leave_after, placed, redis_up, warm
from redisrig import RedisProxy
from rig import CHAT, ask, eventually

LONG = 2500
"""So long that no load of the short ones is a reason to go elsewhere."""
pytestmark = pytest.mark.redis


async def test_staying_requests_are_placed_right_among_leaving_ones(serve, pair, log) -> None:
    rng = random.Random(3)
    proxied = RedisProxy(pair.redis.port)
    try:
        patient = {"redis.timeout_ms": 10_000}  # a busy machine is no outage
        served = await serve(wait=False, **{"redis.url": proxied.url}, **patient)
        await eventually(exact(served, 2), 20)
        seeds = [f"C03 {n}" for n in range(30)]
        truth = await warm(served.url, seeds, n=LONG)
        assert len(set(truth.values())) == 2
        await await_quiet(served)
        proxied.delay_s = 0.1
        leaving = []
        for seed in seeds:
            for n in range(5):
                name = f"C03 gone {seed} {n}"
                leaving.append(
                    asyncio.create_task(leave_after(served.url, name, rng.random() * 0.15))
                )
            worker, matched, cached = placed(await ask(served.url, CHAT, body(seed, n=LONG)))
            assert worker == truth[seed]
            assert matched == cached > 256
            await asyncio.sleep(0.01)
        await asyncio.gather(*leaving)
        assert redis_up(served)
        for seed in random.Random(4).sample(seeds, 20):
            worker, matched, cached = placed(await ask(served.url, CHAT, body(seed, n=LONG)))
            assert (worker, matched) == (truth[seed], cached)
        assert served.gateway.feeds.stats.task_failures == 0
        assert "Traceback" not in log.getvalue()
    finally:
        proxied.close()
