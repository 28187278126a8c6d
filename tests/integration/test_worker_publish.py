"""The publisher against real servers: layout, healing, and silence towards the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from stopwatch import Limit, Stopwatch

from shared import rediskeys
from shared.blocks import unpack_keys
from shared.events import decode_batch, removed, stored
from shared.load import WorkerInfo, WorkerLoad
from shared.rediskeys import RedisKeys
from shared.settings import RedisConfig
from shared.types import Epoch, WorkerId
from worker.eventlog import Contents, EventLog
from worker.publish import Published, RedisPublisher

pytestmark = pytest.mark.redis

WORKER = WorkerId("127.0.0.1:9")
EPOCH = Epoch(77)
NAMES = RedisKeys("test")


class Rig:
    """An event log with known contents, its publisher, and a client that looks on."""

    def __init__(self, url: str, timeout_ms: float = 200.0) -> None:
        self.log = EventLog(WORKER, EPOCH, 1, wall=time.time)
        self.log.attach(asyncio.get_running_loop())
        self.keys: set[int] = set()
        self.living = True
        info = WorkerInfo(id=WORKER, epoch=EPOCH, url="http://127.0.0.1:9", models=("m",))
        published = Published(
            lambda: info, lambda: WorkerLoad(running=3), self.contents, lambda: self.living
        )
        self.publisher = RedisPublisher(
            RedisConfig(url=url, timeout_ms=timeout_ms),
            NAMES,
            self.log,
            published,
            clock=time.monotonic,
            rng=Random(1),
        )
        self.eyes = Redis.from_url(url, protocol=2)

    async def contents(self) -> Contents:
        return Contents(self.log.seq, list(self.keys))

    def store(self, *keys: int) -> None:
        self.keys.update(keys)
        self.log.append([stored(list(keys), None)])

    def remove(self, *keys: int) -> None:
        self.keys.difference_update(keys)
        self.log.append([removed(list(keys))])

    async def lease(self) -> dict[bytes, bytes]:
        return await self.eyes.hgetall(NAMES.worker(WORKER))

    async def logged(self) -> list[int]:
        """Sequence numbers in the stream."""
        entries = await self.eyes.xrange(NAMES.log(NAMES.shard_of(WORKER)))
        batches = [decode_batch(fields[b"b"]) for _, fields in entries]
        assert all((b.worker, b.epoch, b.source) == (WORKER, EPOCH, "worker") for b in batches)
        return [batch.seq for batch in batches]

    async def checkpoint(self) -> tuple[int, set[int]] | None:
        """The manifest's seq and all keys."""
        manifest = await self.eyes.hgetall(NAMES.manifest(WORKER, EPOCH))
        if not manifest:
            return None
        assert int(manifest[b"epoch"]) == EPOCH
        keys: set[int] = set()
        for index in range(rediskeys.CHUNKS):
            data = await self.eyes.get(NAMES.chunk(WORKER, EPOCH, index))
            assert data is not None
            chunk = unpack_keys(data)
            assert list(chunk) == sorted(chunk)
            assert all(key >> 60 == index for key in chunk)
            keys.update(chunk)
        return int(manifest[b"seq"]), keys


@asynccontextmanager
async def rig(url: str) -> AsyncIterator[Rig]:
    made = Rig(url)
    made.publisher.start()
    try:
        yield made
    finally:
        await made.publisher.close()
        made.log.close()
        await made.eyes.aclose()


async def until(check: Callable[[], Awaitable[Any]], timeout_s: float = 20.0) -> Any:
    """The first true value of ``check``."""
    limit = Limit(timeout_s)
    while not limit.over():
        # The onlooker's own connection breaks as well when a server goes.
        with suppress(RedisError):
            if value := await check():
                return value
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen in time")


async def test_lease_log_and_checkpoint(redis_server: Any) -> None:
    async with rig(redis_server.url) as r:
        r.store(1, 2**60, 2**64 - 1)
        lease = await until(r.lease)
        assert msgspec.json.decode(lease[b"info"], type=WorkerInfo).id == WORKER
        assert msgspec.json.decode(lease[b"load"], type=WorkerLoad).running == 3
        assert int(lease[b"epoch"]) == EPOCH
        shard = NAMES.shard_of(WORKER)
        assert await r.eyes.smembers(NAMES.members(shard)) == {WORKER.encode()}
        assert await until(r.checkpoint) == (1, {1, 2**60, 2**64 - 1})
        for key in range(5):
            r.store(100 + key)
        r.remove(1)

        async def all_logged() -> bool:
            return await r.logged() == [1, 2, 3, 4, 5, 6, 7]

        assert await until(all_logged)
        # Every object disappears by itself: there is no key without a lifetime.
        for key in await r.eyes.keys("*"):
            assert await r.eyes.pttl(key) > 0
        assert 0 < await r.eyes.pttl(NAMES.worker(WORKER)) <= rediskeys.LEASE_MS
    async with Redis.from_url(redis_server.url, protocol=2) as eyes:
        assert await eyes.keys("*:w:*") == []
        assert await eyes.keys("*:ck:*") == []
        assert await eyes.smembers(NAMES.members(shard)) == set()


async def test_flushed_redis_is_whole_again_after_one_beat(redis_server: Any) -> None:
    async with rig(redis_server.url) as r:
        r.store(1, 2, 3)
        await until(r.checkpoint)
        await r.eyes.flushall()
        r.store(4)
        assert await until(r.lease, 3.0)

        async def whole() -> bool:
            return await r.checkpoint() == (2, {1, 2, 3, 4})

        assert await until(whole, 3.0)


async def test_a_log_has_a_lifetime_from_its_first_entry_on(redis_server: Any) -> None:
    """A worker that is killed before its next beat leaves nothing for ever."""
    log = NAMES.log(NAMES.shard_of(WORKER))
    async with rig(redis_server.url) as r:
        await until(r.lease)
        for key in range(10):
            await r.eyes.flushall()
            r.store(key)
            left_ms = await until(partial(life_ms, r.eyes, log))
            assert left_ms > 0


async def life_ms(redis: Redis, key: str) -> int:
    """Milliseconds that a key has to live, -1: for ever; 0 while it is not there."""
    left_ms: int = await redis.pttl(key)
    return 0 if left_ms == -2 else left_ms


async def test_a_lost_chunk_is_written_again(redis_server: Any) -> None:
    async with rig(redis_server.url) as r:
        r.store(1, 2**63)
        await until(r.checkpoint)
        chunk = NAMES.chunk(WORKER, EPOCH, 8)
        await r.eyes.delete(chunk)

        async def there() -> bool:
            return bool(await r.eyes.exists(chunk))

        assert await until(there, 3.0)
        assert await r.checkpoint() == (1, {1, 2**63})


async def test_redis_that_comes_and_goes(redis_server: Any) -> None:
    redis_server.stop()
    async with rig(redis_server.url) as r:
        r.store(1)
        await asyncio.sleep(0.3)
        assert not r.publisher.up
        redis_server.start()
        assert await until(r.lease)

        async def first_logged() -> bool:
            return await r.logged() == [1]

        assert await until(first_logged)
        redis_server.stop()
        r.store(2)
        r.remove(1)
        redis_server.start()

        async def caught_up() -> bool:
            return await r.logged() == [2, 3]

        assert await until(caught_up)

        async def whole() -> bool:
            return await r.checkpoint() == (3, {2})

        assert await until(whole)


async def test_frozen_redis_is_an_outage_and_heals(redis_server: Any) -> None:
    async with rig(redis_server.url) as r:
        r.store(1)
        await until(r.checkpoint)
        redis_server.freeze()

        async def down() -> bool:
            return not r.publisher.up

        assert await until(down)
        before = Stopwatch()
        for key in range(200):
            r.store(1000 + key)
        assert before.seconds() < 10
        redis_server.thaw()

        async def caught_up() -> bool:
            return (await r.logged())[-1:] == [201]

        assert await until(caught_up)
        logged = await r.logged()
        # A batch may have been sent twice; none may be missing.
        assert sorted(set(logged)) == list(range(1, 202))


async def test_read_only_redis_is_an_outage(redis_server: Any) -> None:
    async with rig(redis_server.url) as r:
        await until(r.lease)
        await r.eyes.execute_command("REPLICAOF", "127.0.0.1", "1")

        async def down() -> bool:
            return not r.publisher.up

        assert await until(down)
        await r.eyes.execute_command("REPLICAOF", "NO", "ONE")
        r.store(5)

        async def logged() -> bool:
            return await r.logged() == [1]

        assert await until(logged)
        assert r.publisher.up


async def test_a_long_backlog_is_left_to_the_checkpoint(
    redis_server_factory: Callable[..., Any],
) -> None:
    server = redis_server_factory("newest")
    async with rig(server.url) as r:
        await until(r.lease)
        server.stop()
        for key in range(9_000):
            r.store(key)
        server.start()

        async def whole() -> bool:
            return await r.checkpoint() == (9_000, set(range(9_000)))

        assert await until(whole)
        r.store(10_000)

        async def goes_on() -> bool:
            return await r.logged() == [9_001]

        assert await until(goes_on)


async def test_an_engine_that_cannot_serve_loses_its_lease(
    redis_server_factory: Callable[..., Any],
) -> None:
    server = redis_server_factory("newest")
    async with rig(server.url) as r:
        await until(r.lease)
        r.living = False

        async def gone() -> bool:
            return not await r.lease()

        assert await until(gone, rediskeys.LEASE_MS / 1000 + 10)
        r.living = True
        assert await until(r.lease)


async def test_closing_at_any_moment_ends(redis_server_factory: Callable[..., Any]) -> None:
    # asyncio.wait_for (in the client library) can swallow a cancellation on Python 3.11.
    url = redis_server_factory("newest").url
    dice = Random(3)
    for turn in range(80):
        r = Rig(url)
        r.publisher.start()
        for key in range(dice.randrange(4)):
            await asyncio.sleep(dice.random() * 0.01)
            r.store(turn * 10 + key)
        await asyncio.sleep(dice.random() * 0.02)
        async with asyncio.timeout(30):
            await r.publisher.close()
        await r.eyes.aclose()
