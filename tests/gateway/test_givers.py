"""Which worker gave a response, while Redis comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
from rig import eventually

from gateway.givers import Givers
from shared.rediskeys import Command, RedisKeys, Reply
from shared.redislink import RedisLink, RedisLost
from shared.types import WorkerId

KEYS = RedisKeys("headwater")


class Link:
    """Redis as the test says: it answers, refuses, or keeps everybody waiting until it refuses."""

    def __init__(self) -> None:
        self.mood = "answers"
        self.kept: dict[str, bytes] = {}
        self.lasts: dict[str, object] = {}
        self.waiting: list[asyncio.Event] = []
        self.calls = 0

    async def call(self, commands: Sequence[Command]) -> list[Reply]:
        self.calls += 1
        if self.mood == "silent":
            self.waiting.append(asyncio.Event())
            await self.waiting[-1].wait()
        if self.mood != "answers":
            raise RedisLost("away")
        return [self._answer(command) for command in commands]

    def _answer(self, command: Command) -> Reply:
        if command[0] == "SET":
            self.kept[str(command[1])] = str(command[2]).encode()
            self.lasts[str(command[1])] = command[4]
        if command[0] == "EXISTS":
            return int(str(command[1]) in self.kept)
        return [self.kept.get(str(command[1]))] if command[0] == "MGET" else b"OK"

    def give_up(self) -> None:
        """Who waits is told that there is no answer."""
        for each in self.waiting:
            each.set()
        self.waiting.clear()

    async def drop(self) -> None:
        pass


@pytest.fixture
async def two() -> AsyncIterator[tuple[Link, Givers]]:
    """Givers of a gateway that has passed on nothing itself, and of the Redis where another one's
    response ``theirs`` is."""
    link = Link()
    other = Givers(cast(RedisLink, link), KEYS, rest_s=0.0)
    other.start()
    other.gave("t", "theirs", WorkerId("w"))
    await turns()
    asking = Givers(cast(RedisLink, link), KEYS, rest_s=0.0)
    asking.start()
    assert await asking.giver("t", "theirs") == "w"
    yield link, asking
    link.give_up()
    await asking.close()
    await other.close()


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def at_once(givers: Givers, response: str = "theirs") -> Any:
    """What is known without waiting for Redis."""
    task = asyncio.create_task(givers.giver("t", response))
    await turns()
    assert task.done(), "it waits"
    return await task


async def test_only_the_first_requests_wait_for_a_silent_redis(two: Any) -> None:
    link, givers = two
    link.mood = "silent"
    first = asyncio.create_task(givers.giver("t", "theirs"))
    await turns()
    assert not first.done()
    link.give_up()
    assert await first is None
    for _ in range(5):  # however often Redis is looked after meanwhile
        assert await at_once(givers) is None
        await turns()
        link.give_up()
    givers.gave("t", "mine", WorkerId("v"))
    assert await at_once(givers, "mine") == "v"


@pytest.mark.parametrize("mood", ["silent", "refuses"])
async def test_it_is_asked_again_once_it_is_back(two: Any, mood: str) -> None:
    link, givers = two
    link.mood = mood
    first = asyncio.create_task(givers.giver("t", "theirs"))
    await turns()
    link.give_up()
    assert await first is None
    link.mood = "answers"
    link.give_up()
    await turns()
    assert await at_once(givers) == "w"
    givers.gave("t", "mine", WorkerId("v"))
    await turns()
    assert b"v" in link.kept.values()


async def test_one_that_is_not_used_is_left_alone_between_looks(two: Any) -> None:
    link, givers = two
    link.mood = "refuses"
    givers._rest_s = 3600.0
    assert await givers.giver("t", "theirs") is None
    before = link.calls
    for _ in range(5):
        assert await at_once(givers) is None
    assert link.calls == before


@pytest.mark.parametrize("mood", ["silent", "refuses"])
@pytest.mark.parametrize("asked", [False, True], ids=["unasked", "asked before"])
async def test_what_was_given_meanwhile_is_told_afterwards(
    two: Any, mood: str, asked: bool
) -> None:
    """Others learn of the response whose word was lost on the way, and of all that followed it."""
    link, givers = two
    link.mood = mood
    names = [f"mine{number}" for number in range(500)]
    if asked:
        first = asyncio.create_task(givers.giver("t", "theirs"))
        await turns()
    for name in names:
        givers.gave("t", name, WorkerId("v"))
        if name.endswith("7"):
            await turns()
            link.give_up()
    if asked:
        assert await first is None
    assert [await at_once(givers, name) for name in names] == ["v"] * 500
    link.mood = "answers"
    link.give_up()
    await turns()
    other = Givers(cast(RedisLink, link), KEYS, rest_s=0.0)
    other.start()
    assert [await other.giver("t", name) for name in names] == ["v"] * 500
    assert await at_once(givers) == "w"
    await other.close()


async def test_only_the_newest_wait_for_it(two: Any) -> None:
    link, givers = two
    link.mood = "refuses"
    for number in range(10_000):
        givers.gave("t", f"mine{number}", WorkerId("v"))
    await turns()
    assert len(givers._line) <= 4096
    link.mood = "answers"
    for _ in range(5):
        await turns()
    other = Givers(cast(RedisLink, link), KEYS, rest_s=0.0)
    other.start()
    assert await other.giver("t", "mine0") is None
    assert await other.giver("t", "mine9999") == "v"
    await other.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def told() -> AsyncIterator[tuple[Link, Givers, Clock]]:
    """A gateway that has told of 500 responses, one a second, and looks after them all the time."""
    link, clock = Link(), Clock()
    givers = Givers(cast(RedisLink, link), KEYS, rest_s=0.0, look_s=0.001, clock=clock)
    givers.start()
    for number in range(500):
        clock.now += 1.0
        givers.gave("t", f"mine{number}", WorkerId("v"))
    await turns()
    assert len(link.kept) == 500
    yield link, givers, clock
    link.give_up()
    await givers.close()


@pytest.mark.parametrize("left", [0, 330, 490], ids=["all", "the newer third", "the newest"])
async def test_what_redis_has_lost_is_told_again(told: Any, left: int) -> None:
    link, givers, _ = told
    for key in list(link.kept)[left:]:
        del link.kept[key]
    await eventually(lambda: len(link.kept) == 500)
    shortest = min(int(str(each)) for each in link.lasts.values())
    assert shortest == (3600 - 499) * 1000, "no longer than before"
    assert await at_once(givers, "mine0") == "v"


async def test_a_redis_that_evicts_is_not_told_all_the_time(told: Any) -> None:
    link, _, clock = told
    link.kept.clear()
    await eventually(lambda: len(link.kept) == 500)
    link.kept.clear()
    before = link.calls
    await asyncio.sleep(0.02)
    await turns()
    assert (link.kept, link.calls) == ({}, before)
    clock.now += 20.0
    await eventually(lambda: len(link.kept) == 500)


async def test_what_has_expired_is_not_looked_after(told: Any) -> None:
    link, _, clock = told
    clock.now += 3600.0 - 100.0
    link.kept.clear()
    await eventually(lambda: link.kept)
    await turns()
    assert len(link.kept) == 100
    clock.now += 3600.0
    link.kept.clear()
    before = link.calls
    await asyncio.sleep(0.02)
    assert (link.kept, link.calls) == ({}, before)


@pytest.mark.parametrize("mood", ["silent", "refuses"])
async def test_a_redis_that_comes_back_empty_is_told_what_it_had(told: Any, mood: str) -> None:
    link, givers, _ = told
    link.mood = mood
    givers.gave("t", "meanwhile", WorkerId("v"))
    await turns()
    link.kept.clear()
    link.give_up()
    await turns()
    link.mood = "answers"
    link.give_up()
    await eventually(lambda: len(link.kept) == 501)


async def test_a_look_that_fails_keeps_nobody_waiting(told: Any) -> None:
    link, givers, _ = told
    link.mood = "refuses"
    await eventually(lambda: givers._away)
    assert await at_once(givers) is None
