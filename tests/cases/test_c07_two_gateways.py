"""C07, C08 and F03 on a Cluster: two gateways, flushed masters, and a drain told to one."""

from __future__ import annotations

import asyncio

import pytest
from redisload import await_known, await_quiet, body, exact, load, placed, warm
from redisrig import Cluster, kinds, talk
from rig import CHAT, ask, eventually

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("kind", kinds("newest"))
async def test_a_cluster_that_forgets(serve, worker_process, tmp_path, kind) -> None:
    cluster = Cluster.start(tmp_path / "c", kind)
    try:
        workers = [worker_process("--redis", cluster.url, wait=False) for _ in range(2)]
        for worker in workers:
            await asyncio.to_thread(worker.await_ready)
        patient = {"redis.timeout_ms": 10_000}
        one = await serve(wait=False, **{"redis.url": cluster.url}, **patient)
        two = await serve(wait=False, **{"redis.url": cluster.masters[1].url}, **patient)
        for gateway in (one, two):
            await eventually(exact(gateway, 2), 60)
        early = await warm(one.url, [f"C07 early {n}" for n in range(6)])
        async with load(two.url, lambda n: body(f"C07 load {n % 5}"), per_s=4) as requests:
            for node in cluster.masters:
                talk(node.port, "FLUSHALL")
                await asyncio.sleep(0.5)
            late = await warm(one.url, [f"C07 late {n}" for n in range(6)])
            for gateway in (one, two):
                await eventually(exact(gateway, 2), 30)
        requests.check()
        # Who starts now knows what was there before, and what came after.
        three = await serve(wait=False, **{"redis.url": cluster.masters[2].url}, **patient)
        await eventually(exact(three, 2), 60)
        for gateway in (two, three):
            await await_quiet(gateway)
            for seed, home in {**early, **late}.items():
                await await_known(gateway, seed, home, 20)
                worker, matched, cached = placed(await ask(gateway.url, CHAT, body(seed)))
                assert (worker, matched) == (home, cached)
        drained = workers[0].url.removeprefix("http://")
        path = f"/admin/workers/{drained}/drain"
        assert (await ask(one.admin, path, b"", method="POST")).status == 200
        for gateway in (two, three):
            await eventually(lambda g=gateway: out(g, drained), 20)
            replies = await asyncio.gather(*(ask(gateway.url, CHAT, body(seed)) for seed in early))
            assert drained not in {placed(reply)[0] for reply in replies}
        for node in cluster.masters:
            assert "CROSSSLOT" not in str(talk(node.port, "INFO", "errorstats"))
    finally:
        cluster.stop()


def out(served, name: str) -> bool:
    """Whether a worker gets nothing."""
    found = [w for w in served.gateway.router.workers(0.0) if str(w.id) == name]
    return not found or bool(found[0].reason)
