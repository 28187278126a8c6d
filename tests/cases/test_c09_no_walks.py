"""C09: nothing walks over all keys, and no command is long, with half a million index keys.

Scaled: 100,000 in the ordinary suite.

The keys belong to five workers that only speak of what they hold; a stub answers the requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from conftest import RedisServer
from depth import DEPTH
from integration.feeds.conftest import StandIn
from redisload import load
from redisrig import talk
from rig import chat, eventually
from stopwatch import waited_s

from shared.rediskeys import CHUNKS, RedisKeys
from shared.redislink import RedisLink

pytestmark = pytest.mark.redis
N, EACH = 5, 20_000 if DEPTH == 1 else 100_000
KEYS = RedisKeys("t")


@pytest.fixture
async def holders(redis_server_factory, free_port):
    """Five workers with as many blocks each, and their Redis."""
    server = redis_server_factory("newest", "--slowlog-log-slower-than", "10000")
    rng, made = random.Random(9), []
    for _ in range(N):
        holder = StandIn(free_port(), redis_url=server.url)
        holder.contents = {rng.getrandbits(64) for _ in range(EACH)}
        await holder.listen()
        await holder.register()
        made.append(holder)
    yield server, made
    for holder in made:
        await holder.die()


async def test_half_a_million_keys(serve, stub, holders) -> None:
    server, made = holders
    assert talk(server.port, "DBSIZE") >= N * (CHUNKS + 2)
    worker = await stub(("other",))
    settings = {"redis.url": server.url, "deployment.name": "t"}
    one = await serve(worker, **settings)
    await eventually(lambda: exact_holders(one), 30)
    talk(server.port, "SLOWLOG", "RESET")
    waited = waited_s(server.process.pid)
    talk(server.port, "CONFIG", "RESETSTAT")
    since = time.monotonic()
    async with load(one.url, lambda n: chat("x " * 3000 + str(n), model="other"), 50) as before:
        await asyncio.sleep(1.0)
    quiet, lasted_s = commands(server.port), time.monotonic() - since
    async with load(one.url, lambda n: chat("y " * 3000 + str(n), model="other"), 50) as during:
        two = await serve(worker, **settings)
        await eventually(lambda: exact_holders(two), 30)
        one.gateway.feeds.remove_worker(made[0].name)
        assert one.gateway.router.workers(0.0)
        await asyncio.sleep(0.5)
    before.check()
    during.check()
    assert not (slow := long_commands(server, waited)), slow
    used = commands(server.port)
    assert not {"keys", "scan", "flushall", "hscan", "sscan"} & used.keys()
    # Fifty requests a second with 6,000 characters each: Redis is not asked for any of them.
    assert sum(quiet.values()) < 200 * max(1.0, lasted_s) + 5 * len(before.replies)
    for name in ("hget", "get", "smismember", "eval", "mget"):
        assert quiet.get(name, 0) <= 5 * N, name
    assert during.percentile(0.5) < before.percentile(0.5) + 0.5


def long_commands(server: RedisServer, waited: float) -> list[Any]:
    """Those of more than 10 ms in the server's log of slow ones, which go by the clock: what it
    waited for a CPU since then, 10 ms at a time and more, may be in one of them."""
    longest = 10_000 + 1e6 * (waited_s(server.process.pid) - waited)
    return [x for x in talk(server.port, "SLOWLOG", "GET", 50) if x[2] > longest]


def exact_holders(served) -> bool:
    """All five are known with all that they hold."""
    workers = [w for w in served.gateway.router.workers(0.0) if "m" in w.models]
    return len(workers) == N and all(w.index_blocks == EACH for w in workers)


def commands(port: int) -> dict[str, int]:
    """Calls by command since the last reset."""
    found = talk(port, "INFO", "commandstats")
    return {name.removeprefix("cmdstat_"): int(v["calls"]) for name, v in found.items()}


async def test_a_real_checkpoint_of_many_blocks_is_short_work(redis_server_factory) -> None:
    """The largest transaction that a worker sends: 100,000 blocks on two tiers."""
    server = redis_server_factory("oldest", "--slowlog-log-slower-than", "10000")
    waited = waited_s(server.process.pid)
    link = RedisLink(server.url, 5.0)
    chunk = b"x" * (100_000 // CHUNKS * 8)
    names = [KEYS.chunk("w", 1, n) for n in range(CHUNKS)]
    names += [KEYS.host_chunk("w", 1, n) for n in range(CHUNKS)]
    for _ in range(3):
        await link.transact([("SET", name, chunk, "PX", 60_000) for name in names])
        await link.call([("MGET", *names)])
    await link.call([("UNLINK", *names)])
    await link.drop()
    assert not (slow := long_commands(server, waited)), slow
