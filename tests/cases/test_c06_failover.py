"""C06: a master that was made a replica is left, though its connections stay open."""

from __future__ import annotations

import asyncio

import pytest
from redisload import await_known, body, exact, load, redis_up, warm
from redisrig import RedisProxy, talk
from rig import eventually

pytestmark = pytest.mark.redis


async def test_a_failover_that_cuts_no_connection(
    serve, worker_process, redis_server_factory
) -> None:
    first, second = redis_server_factory("newest"), redis_server_factory("newest")
    proxied = RedisProxy(first.port)
    try:
        workers = [worker_process("--redis", proxied.url, wait=False) for _ in range(2)]
        for worker in workers:
            worker.await_ready()
        # The server itself says that it is no master: no time limit is needed to find out.
        patient = {"redis.timeout_ms": 10_000}
        served = await serve(wait=False, **{"redis.url": proxied.url}, **patient)
        await eventually(exact(served, 2), 20)
        await warm(served.url, ["C06 before"])
        async with load(served.url, lambda n: body(f"C06 {n}"), per_s=20) as requests:
            talk(first.port, "REPLICAOF", "127.0.0.1", second.port)
            proxied.target = second.port
            await eventually(lambda: not redis_up(served), 10)
            await eventually(lambda: redis_up(served), 10)
            await eventually(exact(served, 2), 10)
            await asyncio.sleep(0.5)
        requests.check()
        names = {w.url.removeprefix("http://") for w in workers}
        listed = [
            name.decode()
            for shard in range(16)
            for name in talk(second.port, "SMEMBERS", f"hw:{{headwater.{shard}}}:members")
        ]
        assert set(listed) == names
        assert served.gateway.feeds.stats.redis_outages == 1
        late = await serve(wait=False, **{"redis.url": second.url})
        await eventually(exact(late, 2), 20)
        for seed, worker in (await warm(served.url, ["C06 after"])).items():
            await await_known(late, seed, worker)
    finally:
        proxied.close()
