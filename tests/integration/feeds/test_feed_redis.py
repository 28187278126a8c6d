"""The background side with real Redis servers, oldest and newest: registrations, log, gaps."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis.asyncio import Redis
from stopwatch import Stopwatch

from gateway.decision import Booked

pytestmark = pytest.mark.redis


@pytest.fixture
async def redis(redis_server):
    client = Redis.from_url(redis_server.url)
    yield client
    await client.aclose()


async def test_a_registered_worker_joins_and_its_events_come_through_redis(
    kit, stand_in, redis_server
) -> None:
    worker = await stand_in(redis_server.url)
    await worker.store(1, 2)
    async with kit.running(kit.settings(redis_server.url)) as gateway:
        router = gateway.router
        await kit.until(lambda: router.exact(worker.name, "redis"))
        assert gateway.stats.redis_up
        await kit.until(lambda: router.holds(worker.name, {1, 2}))
        await worker.store(3)
        took = await kit.until(lambda: router.holds(worker.name, {1, 2, 3}))
        assert took < 1.0
        await kit.until(lambda: gateway.stats.http_feeds == 0)
        assert gateway.stats.index_lag_s < 1.0
        seen, since = worker.requests.count("/headwater/load"), time.monotonic()
        await asyncio.sleep(1.0)
        probes = (time.monotonic() - since) / 0.3
        assert worker.requests.count("/headwater/load") - seen <= 1 + probes


async def test_a_late_gateway_knows_everything_without_new_traffic(
    kit, stand_in, redis_server, redis
) -> None:
    workers = [await stand_in(redis_server.url) for _ in range(4)]
    for index, worker in enumerate(workers):
        for key in range(50):
            await worker.store(1000 * index + key)
        await worker.checkpoint()
    for shard in range(kit.keys.shards):
        await redis.xtrim(kit.keys.log(shard), maxlen=0, approximate=False)
    for index, worker in enumerate(workers):
        await worker.store(7_000_000 + index)
        await worker.evict(1000 * index)
    async with (
        kit.running(kit.settings(redis_server.url), "g1") as first,
        kit.running(kit.settings(redis_server.url), "g2") as second,
    ):
        for gateway in (first, second):
            for worker in workers:
                await kit.until(lambda: gateway.router.exact(worker.name, "redis"))  # noqa: B023
                await kit.until(
                    lambda: gateway.router.holds(worker.name, worker.contents),  # noqa: B023
                )
            assert gateway.stats.checkpoint_resyncs >= 4
            assert gateway.stats.gaps == 0
        await kit.until(lambda: first.stats.peers == 1 and second.stats.peers == 1)
        first.router.own = {workers[0].name: Booked(1.5, 400, 3)}
        took = await kit.until(lambda: second.router.peers.get("g1") == first.router.own)
        assert took < 2.0
    assert second.router.peers["g1"] in ({}, first.router.own)


async def test_work_under_way_is_told_ten_times_a_second(kit, redis_server) -> None:
    async with (
        kit.running(kit.settings(redis_server.url), "g1") as first,
        kit.running(kit.settings(redis_server.url), "g2") as second,
    ):
        first.router.own = {"w": Booked(1.0, 1, 1)}
        await kit.until(lambda: second.router.peers.get("g1") == first.router.own)
        await kit.until(lambda: first.stats.peers == 1)
        watch = Stopwatch()
        for number in range(2, 8):
            first.router.own = {"w": Booked(1.0, 1, number)}
            await kit.until(lambda: second.router.peers.get("g1") == first.router.own)
        first.router.own = {}
        await kit.until(lambda: second.router.peers.get("g1") == {})
        assert watch.seconds() < 7 * 0.25  # twice a second: 7 * 0.5 on average


async def test_a_silent_peer_s_bookings_grow_old(kit, redis_server) -> None:
    async with kit.running(kit.settings(redis_server.url), "g2") as second:
        async with kit.running(kit.settings(redis_server.url), "g1") as first:
            first.router.own = {"w": Booked(1.0, 1, 1)}
            await kit.until(lambda: second.router.peers.get("g1") == first.router.own)
        died, told = time.monotonic(), []
        await asyncio.sleep(0.6)  # its last value has been read
        while second.router.peers["g1"]:  # the same value is read again and again
            told.append(second.router.told["g1"])
            await asyncio.sleep(0.1)
    assert len(set(told)) > 1
    # Each time it was written at the same moment, before the peer died.
    # Read anew it would be as old as it can get, two seconds.
    assert max(told) - min(told) < 0.7
    assert max(told) < died + 0.7


async def test_a_dead_peer_is_forgotten_in_two_seconds(kit, redis_server) -> None:
    async with kit.running(kit.settings(redis_server.url), "g2") as second:
        async with kit.running(kit.settings(redis_server.url), "g1") as first:
            first.router.own = {"w": Booked(1.0, 1, 1)}
            await kit.until(lambda: second.router.peers.get("g1") == first.router.own)
        took = await kit.until(lambda: second.router.peers["g1"] == {}, 8)
        assert took < 5.0  # two seconds of life, and as much again for a busy machine
        await kit.until(lambda: second.stats.peers == 0)


@pytest.mark.parametrize("lost", ["middle", "tail"])
async def test_lost_batches_are_noticed_and_healed(kit, stand_in, redis_server, lost) -> None:
    worker = await stand_in(redis_server.url)
    async with kit.running(kit.settings(redis_server.url)) as gateway:
        await kit.until(lambda: gateway.router.exact(worker.name, "redis"))
        await worker.store(1, 2, 3)
        await kit.until(lambda: gateway.router.holds(worker.name, {1, 2, 3}))
        worker.drop_next = 5
        for key in range(10, 14):
            await worker.store(key)
        await worker.evict(2)
        if lost == "middle":
            await worker.store(20)
        await kit.until(lambda: gateway.router.holds(worker.name, worker.contents), 6)
        assert gateway.stats.gaps == 1
        await kit.until(lambda: gateway.router.exact(worker.name))
        await worker.store(21)
        await kit.until(lambda: gateway.router.holds(worker.name, worker.contents))
        await kit.until(lambda: gateway.stats.http_feeds == 0)


async def test_a_checkpoint_closes_a_gap_if_it_can(kit, stand_in, redis_server) -> None:
    worker = await stand_in(redis_server.url)
    async with kit.running(kit.settings(redis_server.url)) as gateway:
        await kit.until(lambda: gateway.router.exact(worker.name, "redis"))
        await worker.store(1)
        await kit.until(lambda: gateway.router.holds(worker.name, {1}))
        await kit.until(lambda: gateway.stats.http_feeds == 0)
        asked = worker.requests.count("/headwater/events")
        worker.drop_next = 1
        await worker.store(2)
        await worker.checkpoint()
        before = gateway.stats.checkpoint_resyncs
        await worker.store(3)
        await kit.until(lambda: gateway.router.holds(worker.name, {1, 2, 3}))
        assert gateway.stats.checkpoint_resyncs == before + 1
        assert worker.requests.count("/headwater/events") == asked


async def test_flushall_heals_within_a_heartbeat_and_loses_nobody(
    kit, stand_in, redis_server, redis
) -> None:
    worker = await stand_in(redis_server.url)
    await worker.store(1, 2)
    async with kit.running(kit.settings(redis_server.url)) as gateway:
        await kit.until(lambda: gateway.router.exact(worker.name, "redis"))
        await redis.flushall()
        await worker.store(3)
        await kit.until(lambda: gateway.router.holds(worker.name, {1, 2, 3}), 4)
        assert gateway.router.left == []
        assert gateway.router.health[worker.name] is True
        async with kit.running(kit.settings(redis_server.url), "g2") as late:
            await kit.until(lambda: late.router.exact(worker.name))
            await kit.until(lambda: late.router.holds(worker.name, {1, 2, 3}))


async def test_a_killed_and_restarted_worker_begins_empty(kit, stand_in, redis_server) -> None:
    worker = await stand_in(redis_server.url)
    await worker.store(*range(50))
    async with kit.running(kit.settings(redis_server.url)) as gateway:
        await kit.until(lambda: gateway.router.holds(worker.name, set(range(50))))
        for _ in range(3):
            await worker.die()
            worker.begin_again()
            await worker.listen()
            await worker.register()
            took = await kit.until(
                lambda: gateway.router.infos[worker.name].epoch == worker.epoch, 3
            )
            assert took < 1.2
            await worker.store(7)
            await kit.until(lambda: gateway.router.holds(worker.name, {7}))
            await kit.until(lambda: gateway.router.exact(worker.name))
        assert gateway.router.left == []


async def test_a_drained_worker_leaves_at_once(kit, stand_in, redis_server) -> None:
    worker, other = await stand_in(redis_server.url), await stand_in(redis_server.url)
    async with kit.running(kit.settings(redis_server.url)) as gateway:
        router = gateway.router
        await kit.until(lambda: router.health.get(worker.name) and router.health.get(other.name))
        worker.load = type(worker.load)(draining=True)
        await kit.until(lambda: worker.name in router.draining)
        await worker.withdraw()
        took = await kit.until(lambda: router.left, 4)
        assert took < 1.6
        assert router.left == [(worker.name, "drained")]


async def test_the_same_worker_in_list_and_redis_is_one(kit, stand_in, redis_server) -> None:
    worker = await stand_in(redis_server.url)
    url = worker.url.replace("127.0.0.1", "localhost")
    async with kit.running(kit.settings(redis_server.url, url)) as gateway:
        await kit.until(lambda: gateway.router.exact(worker.name, "redis"))
        await asyncio.sleep(1.5)
        assert list(gateway.router.infos) == [worker.name]
        assert gateway.router.left == []


async def test_a_removed_worker_stays_away_until_it_restarts(kit, stand_in, redis_server) -> None:
    worker = await stand_in(redis_server.url)
    async with kit.running(kit.settings(redis_server.url)) as gateway:
        await kit.until(lambda: gateway.router.health.get(worker.name))
        assert gateway.feeds.remove_worker(worker.name)
        await asyncio.sleep(1.5)
        assert gateway.router.infos == {}
        await worker.die()
        worker.begin_again()
        await worker.listen()
        await worker.register()
        await kit.until(lambda: gateway.router.health.get(worker.name))
