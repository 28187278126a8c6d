"""C07: a Cluster of three masters serves like one server."""

from __future__ import annotations

import asyncio

import pytest
from redisload import await_known, body, exact, placed, warm
from redisrig import Cluster, kinds, talk
from rig import CHAT, ask, eventually

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("kind", kinds("newest"))
async def test_traffic_on_a_cluster(serve, worker_process, tmp_path, kind) -> None:
    cluster = Cluster.start(tmp_path / "c", kind)
    try:
        env = {
            "HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "50",
            "HEADWATER_CACHE__KV_BLOCKS": "8192",
        }
        workers = [worker_process("--redis", cluster.url, env=env, wait=False) for _ in range(2)]
        for worker in workers:
            worker.await_ready()
        one = await serve(wait=False, **{"redis.url": cluster.url})
        two = await serve(wait=False, **{"redis.url": cluster.masters[2].url})
        for gateway in (one, two):
            await eventually(exact(gateway, 2), 20)
        seeds = [f"C07 {n}" for n in range(20)]
        truth = await warm(one.url, seeds)
        assert len(set(truth.values())) == 2
        await asyncio.sleep(1.5)  # until the workers' reports of this load are old
        for seed in seeds:
            await await_known(two, seed, truth[seed])
            worker, matched, cached = placed(await ask(two.url, CHAT, body(seed)))
            assert (worker, matched) == (truth[seed], cached)
        # Ten turns of one conversation, by both in turn, stay where they began.
        messages = [{"role": "user", "content": "C07 " * 1000}]
        homes = set()
        for turn in range(10):
            request = {"model": "fake", "messages": messages, "max_tokens": 4}
            reply = await ask((one, two)[turn % 2].url, CHAT, request)
            homes.add(placed(reply)[0])
            answer = reply.json["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"and {turn}"},
            ]
        assert len(homes) == 1
        for gateway in (one, two):
            assert gateway.gateway.feeds.stats.redis_outages == 0
            assert gateway.gateway.feeds.stats.task_failures == 0
        for node in cluster.masters:
            assert "CROSSSLOT" not in str(talk(node.port, "INFO", "errorstats"))
    finally:
        cluster.stop()
