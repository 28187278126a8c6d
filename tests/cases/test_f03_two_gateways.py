"""F03 with two gateways on one Redis: who is drained through one gets nothing from the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cachestub import Engine, post, words
from caserig import counts, settles
from conftest import RedisServer
from redis.asyncio import Redis
from rig import Stub, ask

pytestmark = pytest.mark.redis


class Two:
    """S1 and S2 behind G and G2, which share a Redis."""

    def __init__(self, stubs: list[Stub], redis: RedisServer, serve: Any) -> None:
        self.stubs, self.redis, self.serve = stubs, redis, serve
        self.gateways: list[Any] = []

    async def more(self) -> Any:
        """One more gateway, which has met S2."""
        made = await self.serve(*self.stubs, wait=False, **{"redis.url": self.redis.url})

        async def met() -> bool:
            return await state(made, self.stubs[1]) == "ready"

        await settles(met, 10)
        self.gateways.append(made)
        return made

    async def change(self, gateway: int, action: str) -> None:
        """An operator speaks to one of them about S1."""
        path = f"/admin/workers/{self.stubs[0].id}/{action}"
        assert (await ask(self.gateways[gateway].admin, path, {})).status == 200

    async def flush(self) -> None:
        """Redis forgets everything."""
        async with Redis.from_url(self.redis.url) as client:
            await client.flushall()

    async def states(self) -> list[str]:
        """Of S1, at each gateway."""
        return [await state(served, self.stubs[0]) for served in self.gateways]

    async def become(self, state: str) -> None:
        """S1 at all gateways."""

        async def so() -> bool:
            return set(await self.states()) == {state}

        await settles(so, 10)


async def state(served: Any, one: Stub) -> str:
    """Of a worker at a gateway; empty if it is not listed."""
    listed = (await ask(served.admin, "/admin/workers")).json["workers"]
    return next((str(each["state"]) for each in listed if each["id"] == one.id), "")


@pytest.fixture
async def two(stub, serve, redis_server_factory, monkeypatch) -> Two:
    """See :class:`Two`. They hear of each other more often than usual, so that what they say when
    they think they have been heard does not depend on how fast the machine is."""
    monkeypatch.setattr("gateway.feeds.drains.EVERY_S", 0.05)
    stubs = [await stub(), await stub()]
    for one in stubs:
        Engine(one, service_s=0.0)
    made = Two(stubs, redis_server_factory("newest"), serve)
    await made.more()
    await made.more()
    await made.become("ready")
    return made


async def warm(two: Two) -> str:
    """A prefix that S1 holds, as both gateways know."""
    for seed in range(100):
        prefix = words(400, seed)
        if await post(two.gateways[0].url, prefix) == two.stubs[0].id:
            break

    async def known() -> bool:
        return await post(two.gateways[1].url, prefix) == two.stubs[0].id

    await settles(known, 10)
    return prefix


async def test_nobody_sends_there_from_that_moment(two: Two) -> None:
    prefix = await warm(two)
    await two.change(0, "drain")
    before = counts(two.stubs)[0]
    for n in range(10):
        for served in reversed(two.gateways):
            assert await post(served.url, prefix + words(5, n)) == two.stubs[1].id
    assert counts(two.stubs)[0] == before
    late = await two.more()
    await two.become("draining")
    assert await post(late.url, prefix) == two.stubs[1].id
    await two.change(1, "undrain")
    assert await two.states() == ["ready"] * 3


async def test_words_in_a_row(two: Two) -> None:
    """The last one counts, whoever it was told."""
    for gateway, action, then in (
        (0, "drain", "draining"),
        (1, "drain", "draining"),
        (1, "undrain", "ready"),
        (1, "undrain", "ready"),
        (0, "drain", "draining"),
        (0, "undrain", "ready"),
        (1, "drain", "draining"),
    ):
        await two.change(gateway, action)
        assert await two.states() == [then] * 2


async def test_what_redis_forgets_is_told_again(two: Two) -> None:
    await two.change(0, "drain")
    await two.flush()
    await two.more()
    await two.become("draining")
    await two.change(2, "undrain")
    await two.flush()
    await asyncio.sleep(0.5)
    assert await two.states() == ["ready"] * 3


async def test_redis_away(two: Two) -> None:
    """Each gateway does what it is told, and tells the others when it can."""
    two.redis.stop()
    async with asyncio.timeout(20):
        await two.change(0, "drain")
    assert await two.states() == ["draining", "ready"]
    two.redis.start()
    await two.become("draining")
    await two.change(1, "undrain")
    assert await two.states() == ["ready"] * 2


async def test_whoever_is_taken_in_again_serves(two: Two) -> None:
    await two.change(0, "drain")
    one = two.stubs[0]
    admin = two.gateways[0].admin
    assert (await ask(admin, f"/admin/workers/{one.id}", method="DELETE")).status == 200
    await asyncio.sleep(0.5)
    assert await two.states() == ["", "draining"], "the other one still lists it"
    assert (await ask(admin, "/admin/workers", {"url": one.url})).status == 200
    await two.become("ready")


async def test_a_worker_that_left_and_registers_again_serves(two: Two, worker_process) -> None:
    """Its registration is gone with it, and what was said of it."""
    redis = ("--redis", two.redis.url)
    first = worker_process(*redis)
    name = first.url.removeprefix("http://")

    async def seen(wanted: str) -> None:
        async def so() -> bool:
            states = set()
            for served in two.gateways:
                listed = (await ask(served.admin, "/admin/workers")).json["workers"]
                states.add(next((w["state"] for w in listed if w["id"] == name), ""))
            return states == {wanted}

        await settles(so, 20)

    await seen("ready")
    assert (await ask(two.gateways[1].admin, f"/admin/workers/{name}/drain", {})).status == 200
    await seen("draining")
    first.terminate()
    assert await asyncio.to_thread(first.wait) == 0
    await seen("")
    port = name.rpartition(":")[2]
    await asyncio.to_thread(worker_process, *redis, "--port", port)
    await seen("ready")
