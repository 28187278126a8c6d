"""C08: flushed or evicted keys come back by themselves, and so does a worker that was frozen."""

from __future__ import annotations

import asyncio
import signal

import pytest
from redisload import await_known, body, exact, load, warm
from redisrig import kinds, talk
from rig import eventually

pytestmark = pytest.mark.redis


def members(port: int) -> list[str]:
    """Workers that are listed and have a lease."""
    return sorted(
        name.decode()
        for tag in (f"hw:{{headwater.{shard}}}" for shard in range(16))
        for name in talk(port, "SMEMBERS", f"{tag}:members")
        if talk(port, "EXISTS", f"{tag}:w:{name.decode()}")
    )


@pytest.mark.parametrize("kind", kinds("newest"))
async def test_flush_eviction_and_a_worker_asleep(
    serve, worker_process, redis_server_factory, kind
) -> None:
    server = redis_server_factory(kind)
    workers = [worker_process("--redis", server.url, wait=False) for _ in range(2)]
    for worker in workers:
        worker.await_ready()
    names = sorted(worker.url.removeprefix("http://") for worker in workers)
    served = await serve(wait=False, **{"redis.url": server.url})
    await eventually(exact(served, 2), 20)
    seeds = [f"C08 {n}" for n in range(4)]
    truth = await warm(served.url, seeds)
    async with load(served.url, lambda n: body(f"C08 {n % 20}"), per_s=20) as requests:
        talk(server.port, "FLUSHALL")
        await eventually(lambda: members(server.port) == names, 4)
        # The checkpoints are written again, so a late gateway knows all.
        late = await serve(wait=False, **{"redis.url": server.url})
        await eventually(exact(late, 2), 20)
        for seed in seeds:
            await await_known(late, seed, truth[seed])

        talk(server.port, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        used = int(talk(server.port, "INFO", "memory")["used_memory"])
        talk(server.port, "CONFIG", "SET", "maxmemory", used - 1000)
        await asyncio.sleep(1.5)
        talk(server.port, "CONFIG", "SET", "maxmemory", 0)
        await eventually(lambda: members(server.port) == names, 4)
        await eventually(exact(served, 2), 10)
    requests.check()
    await asleep(workers[0], served, server.port, names)


async def asleep(worker, served, port: int, names: list[str]) -> None:
    """Frozen for longer than its lease, then continued."""
    worker.process.send_signal(signal.SIGSTOP)
    async with load(served.url, lambda n: body(f"C08 late {n % 20}"), per_s=10) as requests:
        await asyncio.sleep(1.0)
        requests.replies.clear()
        requests.failures.clear()
        await eventually(lambda: len(members(port)) == 1, 15)
        worker.process.send_signal(signal.SIGCONT)
        await eventually(lambda: members(port) == names, 5)
        await eventually(exact(served, 2), 10)
    requests.check()
    listed = [str(w.id) for w in served.gateway.router.workers(0.0)]
    assert sorted(listed) == names
