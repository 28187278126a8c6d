"""B09: cache events that never arrive are noticed, and the index is right again soon.

Through Redis (batches cut out of the log while the gateway does not read), and through the
worker's own feed (its connection hangs while more happens than the worker keeps for replay).
"""

from __future__ import annotations

import asyncio

import pytest
from redisload import await_in_step, await_known, body, exact, placed, warm
from redisrig import RedisProxy, kinds, talk
from rig import CHAT, ask, eventually

pytestmark = pytest.mark.redis
SMALL = {"HEADWATER_CACHE__KV_BLOCKS": "600"}
"""About 15 of the prompts: later ones push earlier ones out, so removals are lost as well."""
RESYNC_S = 10.0
LINGER_S = 1.1
"""What was promised of an attempt counts for a second after it, whatever is said meanwhile."""


async def agree(served, worker, seeds: list[str]) -> None:
    """What is predicted of each prompt is what the worker then reports."""
    for seed in seeds:
        _, matched, cached = placed(await ask(served.url, CHAT, body(seed)))
        assert abs(matched - cached) <= 16
        # What the one pushed out of the cache must be known before the next is asked for.
        await await_in_step(served.gateway._index, worker)


@pytest.mark.parametrize("kind", kinds("oldest"))
async def test_batches_cut_out_of_the_log(
    serve, worker_process, redis_server_factory, kind
) -> None:
    server = redis_server_factory(kind)
    proxied = RedisProxy(server.port)
    try:
        worker = worker_process("--redis", server.url, env=SMALL)
        name = worker.url.removeprefix("http://")
        served = await serve(wait=False, **{"redis.url": proxied.url, "redis.timeout_ms": 30_000})
        await eventually(exact(served, 1), 20)
        early = [f"B09 {n}" for n in range(10)]
        await warm(served.url, early)
        await await_known(served, early[-1], name)
        stats = served.gateway.feeds.stats
        gaps = stats.gaps
        assert proxied.freeze(lambda flow: flow.reads_log) == 1
        late = [f"B09 late {n}" for n in range(8)]
        # Not through the gateway: it must not learn of them by itself.
        replies = await asyncio.gather(*(ask(worker.url, CHAT, body(seed)) for seed in late))
        assert {reply.status for reply in replies} == {200}
        await asyncio.sleep(0.1)
        for shard in range(16):
            talk(server.port, "DEL", f"hw:{{headwater.{shard}}}:log")
        await ask(worker.url, CHAT, body("B09 last"))
        proxied.thaw()
        # On a machine so slow that the gateway asked the worker itself meanwhile, nothing is lost.
        await eventually(lambda: stats.gaps > gaps or stats.http_feeds, RESYNC_S)
        await eventually(exact(served, 1), RESYNC_S)
        for seed in (*late[-3:], "B09 last"):
            await await_known(served, seed, name, RESYNC_S)
        await asyncio.sleep(LINGER_S)
        await agree(served, worker, [*late[-3:], *early[:3], "B09 last"])
        # Who starts late is right without new traffic.
        other = await serve(wait=False, **{"redis.url": server.url})
        await eventually(exact(other, 1), 20)
        assert len({g.gateway.router.workers(0.0)[0].index_blocks for g in (served, other)}) == 1
    finally:
        proxied.close()
