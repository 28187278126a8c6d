"""What gateways make of each other's words about draining, in whatever order they hear them."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.feeds import drains
from gateway.feeds.drains import DrainTable, SharedDrains
from shared.rediskeys import RedisKeys
from shared.types import WorkerId

W = WorkerId("w")
steps = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["drain", "undrain", "exchange", "flush"])),
    max_size=30,
)


def exchange(table: DrainTable, redis: dict[bytes, bytes]) -> None:
    """As :class:`SharedDrains` does it."""
    told = dict(redis)
    table.hear(told)
    redis.update({worker.encode(): word for worker, word in table.news(told).items()})


@given(steps)
def test_all_come_to_agree(steps: list[tuple[int, str]]) -> None:
    tables, redis = [DrainTable() for _ in range(3)], dict[bytes, bytes]()
    for number, step in steps:
        if step == "flush":
            redis.clear()
        elif step == "exchange":
            exchange(tables[number], redis)
        else:
            tables[number].say(W, drained=step == "drain")
    for table in tables * 3:
        exchange(table, redis)
    assert len({tuple(table.drained()) for table in tables}) == 1


@given(steps, st.integers(0, 2), st.booleans())
def test_the_last_word_counts(steps: list[tuple[int, str]], last: int, on: bool) -> None:
    """Of one who has heard what the others said before."""
    tables, redis = [DrainTable() for _ in range(3)], dict[bytes, bytes]()
    for number, step in steps:
        if step in ("drain", "undrain"):
            tables[number].say(W, drained=step == "drain")
    for table in tables * 3:
        exchange(table, redis)
    tables[last].say(W, drained=on)
    for number in (last, 0, 1, 2):
        exchange(tables[number], redis)
    assert [table.drained() for table in tables] == [[W] if on else []] * 3


@given(st.binary(max_size=8), st.binary(max_size=30))
def test_what_is_no_word_changes_nothing(name: bytes, value: bytes) -> None:
    table = DrainTable()
    table.say(W, drained=True)
    table.hear({name: value, W.encode(): b"x" + value})
    assert W in table.drained()


def test_who_starts_later_is_not_overruled_by_what_was_said_before() -> None:
    old, redis = DrainTable(), dict[bytes, bytes]()
    old.say(W, drained=True)
    old.say(W, drained=False)
    redis.clear()
    exchange(old, redis)
    new = DrainTable()
    exchange(new, redis)
    new.say(W, drained=True)
    for table in (new, old, new):
        exchange(table, redis)
    assert (old.drained(), new.drained()) == ([W], [W])


def test_who_was_let_go_comes_back_undrained_here_alone() -> None:
    here, there, redis = DrainTable(), DrainTable(), dict[bytes, bytes]()
    there.say(W, drained=True)
    exchange(there, redis)
    exchange(here, redis)
    here.let_go(W)
    exchange(here, redis)
    assert (here.drained(), there.drained()) == ([], [W])
    exchange(there, redis)
    there.say(W, drained=False)
    there.say(W, drained=True)
    exchange(there, redis)
    exchange(here, redis)
    assert here.drained() == [W], "a later word counts again"


def test_who_was_let_go_and_joins_again_serves_everywhere() -> None:
    here, there, redis = DrainTable(), DrainTable(), dict[bytes, bytes]()
    here.say(W, drained=True)
    for table in (here, there):
        exchange(table, redis)
    here.let_go(W)
    here.back(W)
    late = DrainTable()
    for table in (here, there, late):
        exchange(table, redis)
    assert [table.drained() for table in (here, there, late)] == [[], [], []]


class UnhurriedRedis:
    """One hash behind a link on which each call takes 40 ms, and happens in the middle of them."""

    def __init__(self) -> None:
        self.hash: dict[bytes, bytes] = {}

    async def call(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        await asyncio.sleep(0.02)
        replies = [self._do(*command) for command in commands]
        await asyncio.sleep(0.02)
        return replies

    def _do(self, name: str, _key: object, *words: Any) -> Any:
        if name == "HGETALL":
            return [part for pair in self.hash.items() for part in pair]
        if name == "HSET":
            self.hash |= dict(zip((word.encode() for word in words[::2]), words[1::2], strict=True))
        return 1

    async def drop(self) -> None:
        """Nothing is kept."""


class Router:
    """Notes who is drained."""

    def __init__(self) -> None:
        self.drained: set[WorkerId] = set()

    def drain(self, worker: WorkerId, now: float) -> None:
        self.drained.add(worker)

    def undrain(self, worker: WorkerId, now: float) -> None:
        self.drained.discard(worker)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time passes when nothing else is left to do: how fast the machine is plays no part."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@pytest.mark.parametrize("phase", range(14))
def test_the_others_have_heard_of_it_when_the_answer_comes(phase: int) -> None:
    """In whatever moment of the others' own exchanges it is said."""

    async def case() -> None:
        redis, routers = UnhurriedRedis(), [Router(), Router()]
        here, there = (
            SharedDrains(redis, RedisKeys("t"), router, clock=lambda: 0.0, rng=Random(1))  # type: ignore[arg-type]
            for router in routers
        )
        others = asyncio.create_task(there.run())
        await here.say(W, drained=True)
        await asyncio.sleep(1 + phase * 0.02)
        for on in (False, True):
            await here.say(W, drained=on)
            assert [bool(router.drained) for router in routers] == [on, on]
        others.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(case())


@pytest.mark.parametrize("on", [True, False])
def test_what_is_said_before_anything_was_heard_counts_as_said_after_it(on: bool) -> None:
    """To a gateway that has started while Redis is away: it knows of no version yet."""
    old, new, redis = DrainTable(), DrainTable(), dict[bytes, bytes]()
    for drained in (True, False, True, not on):
        old.say(W, drained=drained)
    exchange(old, redis)
    new.say(W, drained=not on)
    new.say(W, drained=on)
    assert new.hear(dict(redis)) == []
    for table in (new, old, new):
        exchange(table, redis)
    assert [table.drained() for table in (old, new)] == [[W] if on else []] * 2


def test_of_that_nothing_is_said_again_later() -> None:
    one, two, redis = DrainTable(), DrainTable(), dict[bytes, bytes]()
    one.say(W, drained=True)
    for table in (one, two):
        exchange(table, redis)
    two.say(W, drained=False)
    for table in (two, one, two):
        exchange(table, redis)
    assert [table.drained() for table in (one, two)] == [[], []]


def test_a_full_table_still_hears_of_workers_that_it_knows(monkeypatch) -> None:
    monkeypatch.setattr(drains, "_MOST", 1)
    table = DrainTable()
    table.hear({b"w": b"1 d", b"other": b"1 d"})
    assert table.hear({b"w": b"2 u"}) == [W]
    assert table.drained() == []
