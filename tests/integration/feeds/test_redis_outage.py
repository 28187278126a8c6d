"""Redis down, frozen, restarted or demoted: the workers' own feeds take over, and give back."""

from __future__ import annotations

import asyncio

import pytest
from caserig import settles
from redis.asyncio import Redis

pytestmark = pytest.mark.redis


async def test_redis_down_at_start_is_no_obstacle_and_heals(
    kit, stand_in, redis_server_factory
) -> None:
    server = redis_server_factory("newest")
    server.stop()
    worker = await stand_in()
    await worker.store(1)
    async with kit.running(kit.settings(server.url, worker.url)) as gateway:
        await kit.until(lambda: gateway.router.exact(worker.name, "from the worker"))
        assert gateway.router.holds(worker.name, {1})
        assert not gateway.stats.redis_up
        assert gateway.stats.redis_reason
        server.start()
        worker.redis_url = server.url
        await worker.register()
        took = await kit.until(lambda: gateway.stats.redis_up)
        took += await kit.until(lambda: gateway.router.exact(worker.name, "redis"))
        assert took < 10
        await kit.until(lambda: gateway.stats.http_feeds == 0, 5)


@pytest.mark.parametrize("outage", ["kill", "freeze"])
async def test_an_outage_costs_no_knowledge(kit, stand_in, redis_server, outage) -> None:
    worker = await stand_in(redis_server.url)
    await worker.store(1)
    async with kit.running(kit.settings(redis_server.url)) as gateway:
        router, stats = gateway.router, gateway.stats
        await kit.until(lambda: router.exact(worker.name, "redis"))
        (redis_server.stop if outage == "kill" else redis_server.freeze)()
        took = await kit.until(lambda: not stats.redis_up)
        assert took < 2.0
        publishing = asyncio.create_task(worker.store(2))
        await kit.until(lambda: router.holds(worker.name, {1, 2}), 3)
        await publishing
        assert router.exact(worker.name)
        assert stats.http_feeds == 1
        (redis_server.start if outage == "kill" else redis_server.thaw)()
        await kit.until(lambda: stats.redis_up and router.exact(worker.name, "redis"), 10)
        await worker.store(3)
        await kit.until(lambda: router.holds(worker.name, {1, 2, 3}), 5)
        await kit.until(lambda: stats.http_feeds == 0, 6)
        await worker.store(4)
        await kit.until(lambda: router.holds(worker.name, {1, 2, 3, 4}), 5)
        assert router.exact(worker.name)
        assert router.left == []
        assert stats.redis_outages == 1


async def test_a_demoted_master_is_left(kit, stand_in, redis_server_factory) -> None:
    server = redis_server_factory("newest")
    async with kit.running(kit.settings(server.url)) as gateway:
        await kit.until(lambda: gateway.stats.redis_up)
        async with Redis.from_url(server.url) as redis:
            await redis.replicaof("127.0.0.1", "1")
            await kit.until(lambda: not gateway.stats.redis_up)
            assert "replica" in gateway.stats.redis_reason
            await redis.replicaof("NO", "ONE")
        await kit.until(lambda: gateway.stats.redis_up)


LINKS = 5
"""Of a gateway, at once."""


async def test_connections_are_bounded_and_no_key_walk_is_used(kit, stand_in, redis_server) -> None:
    worker = await stand_in(redis_server.url)
    async with Redis.from_url(redis_server.url) as redis:
        others = len(await redis.client_list())
        async with kit.running(kit.settings(redis_server.url)) as gateway:
            await kit.until(lambda: gateway.router.exact(worker.name, "redis"))
            for _ in range(20):
                await asyncio.sleep(0.05)
                assert len(await redis.client_list()) <= others + LINKS

        async def as_before() -> bool:
            return len(await redis.client_list()) == others

        await settles(as_before, 5.0)
        used = await redis.info("commandstats")
        assert not {"cmdstat_keys", "cmdstat_scan"} & used.keys()
        # Cutting every connection from outside heals, too.
        async with kit.running(kit.settings(redis_server.url)) as gateway:
            await kit.until(lambda: gateway.router.exact(worker.name, "redis"))
            await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await worker.die()
            await worker.listen()
            await worker.register()
            await worker.store(5)
            await kit.until(lambda: gateway.router.holds(worker.name, {5}))
