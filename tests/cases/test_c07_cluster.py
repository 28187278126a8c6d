"""C07: a Cluster of three masters serves like one server."""

from __future__ import annotations

import pytest
from redisload import await_known, await_quiet, body, exact, placed, warm
from redisrig import Cluster, kinds, talk
from rig import CHAT, ask, eventually

from shared.blocks import GRANULE

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
        patient = {"redis.timeout_ms": 10_000}  # a busy machine is no outage
        one = await serve(wait=False, **{"redis.url": cluster.url}, **patient)
        two = await serve(wait=False, **{"redis.url": cluster.masters[2].url}, **patient)
        for gateway in (one, two):
            await eventually(exact(gateway, 2), 20)
        seeds = [f"C07 {n}" for n in range(20)]
        truth = await warm(one.url, seeds)
        assert len(set(truth.values())) == 2
        for gateway in (one, two):
            await await_quiet(gateway)
        for seed in seeds:
            await await_known(two, seed, truth[seed])
            worker, matched, cached = placed(await ask(two.url, CHAT, body(seed)))
            assert (worker, matched) == (truth[seed], cached)
        # Ten turns of one conversation, by both in turn, stay where they began. What one gateway
        # has just caused the other knows a moment later, on one server too: so it is waited for.
        messages = [{"role": "user", "content": "C07 " * 100}]
        homes, held = [], 0
        for turn in range(10):
            gateway = (one, two)[turn % 2]
            if homes:
                await await_known(gateway, turn, homes[0], tokens=held, messages=messages)
            reply = await ask(gateway.url, CHAT, body(turn, messages=messages, max_tokens=4))
            worker, matched, cached = placed(reply)
            assert cached >= matched >= held
            homes.append(worker)
            held = reply.json["usage"]["prompt_tokens"] // GRANULE * GRANULE
            answer = reply.json["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"and {turn}"},
            ]
        assert len(set(homes)) == 1
        for gateway in (one, two):
            assert gateway.gateway.feeds.stats.redis_outages == 0
            assert gateway.gateway.feeds.stats.task_failures == 0
        for node in cluster.masters:
            assert "CROSSSLOT" not in str(talk(node.port, "INFO", "errorstats"))
    finally:
        cluster.stop()
