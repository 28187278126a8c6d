"""C05: whatever happens to the connection on which news arrive, news arrive again.

Scaled: half-open for as long as it takes the gateway to notice (its time limit of 0.5 s and
the 0.2 s that a read waits), not 60 s.
"""

from __future__ import annotations

import asyncio

import pytest
from redisload import await_known, exact, redis_up, warm
from redisrig import RedisProxy
from rig import eventually

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("how", ["restart", "cut", "half-open"])
async def test_news_arrive_again(serve, pair, how) -> None:
    proxied = RedisProxy(pair.redis.port)
    try:
        two = await serve(wait=False, **{"redis.url": proxied.url})
        await eventually(exact(two, 2), 20)
        one = await serve(wait=False, **{"redis.url": pair.redis.url})
        await eventually(exact(one, 2), 20)
        if how == "restart":
            proxied.refuse()
            await eventually(lambda: not redis_up(two), 10)
        elif how == "cut":
            assert proxied.cut(lambda flow: flow.reads_log) == 1
        else:
            assert proxied.freeze(lambda flow: flow.reads_log) == 1
        during = await warm(one.url, [f"C05 {how} during"])
        if how == "restart":
            await asyncio.sleep(0.5)
            proxied.accept()
            await eventually(lambda: redis_up(two), 10)
        after = await warm(one.url, [f"C05 {how} after"])
        for seed, worker in {**during, **after}.items():
            await await_known(two, seed, worker, 15.0)
        await eventually(exact(two, 2), 15)
        assert two.gateway.feeds.stats.task_failures == 0
    finally:
        proxied.close()


async def test_news_arrive_after_the_server_lost_everything(
    serve, worker_process, redis_server_factory
) -> None:
    """A restart of the server itself, empty, in the midst of it."""
    server = redis_server_factory("oldest")
    worker = worker_process("--redis", server.url, env={"HEADWATER_CACHE__KV_BLOCKS": "4096"})
    served = await serve(wait=False, **{"redis.url": server.url})
    await eventually(exact(served, 1), 20)
    name = worker.url.removeprefix("http://")
    other = await serve(worker_url_stub(worker), wait=False)
    await eventually(exact(other, 1, "worker"), 20)
    server.stop()
    await warm(other.url, ["C05 down"])
    server.start()
    await warm(other.url, ["C05 up"])
    await eventually(exact(served, 1), 15)
    for seed in ("C05 down", "C05 up"):
        await await_known(served, seed, name, 15.0)
    late = await serve(wait=False, **{"redis.url": server.url})
    await eventually(exact(late, 1), 15)
    for seed in ("C05 down", "C05 up"):
        await await_known(late, seed, name, 15.0)


def worker_url_stub(worker):
    """A worker process in the place of a stub."""
    from types import SimpleNamespace

    return SimpleNamespace(url=worker.url, id=worker.url.removeprefix("http://"))
