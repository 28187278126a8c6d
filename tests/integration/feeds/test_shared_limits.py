"""Limits of tenants that all gateways of a Redis count together, and what is done without it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Literal

import pytest
from conftest import RedisServer
from redisrig import RedisProxy, talk
from stopwatch import Stopwatch

from gateway import sharedlimits
from gateway.sharedlimits import Limiter
from gateway.tenancy import Limits, Meters
from shared.errors import NoCapacity, RateLimited
from shared.rediskeys import RedisKeys
from shared.redislink import RedisLink

KEYS = RedisKeys("limits")
Make = Callable[..., Awaitable[tuple[Limiter, Meters]]]


@pytest.fixture
def redis(redis_server_factory: Callable[..., RedisServer]) -> RedisServer:
    return redis_server_factory("newest")


@pytest.fixture
async def gateway(redis: RedisServer) -> AsyncIterator[Make]:
    """``limiter, meters = await gateway()``: one more gateway's."""
    async with AsyncExitStack() as stack:

        async def make(
            url: str = redis.url, away: Literal["open", "closed"] = "open", wait: bool = True
        ) -> tuple[Limiter, Meters]:
            meters, link = Meters(), RedisLink(url, 5.0)
            name = f"g{Random().getrandbits(40)}"
            limiter = Limiter(
                meters, link, KEYS, name, away=away, clock=time.monotonic, rng=Random(1)
            )
            limiter.start()
            stack.push_async_callback(limiter.close)
            if wait:
                await until(lambda: limiter.shared)
            return limiter, meters

        yield make


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no outage."""
    monkeypatch.setattr(sharedlimits, "WAIT_S", 5.0)


async def until(check: Callable[[], object], within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        while not check():  # noqa: ASYNC110 - plain values
            await asyncio.sleep(0.01)


async def tries(limiter: Limiter, limits: Limits, tokens: int = 1) -> RateLimited | None:
    try:
        await limiter.enter("a", limits, tokens)
    except RateLimited as error:
        return error
    return None


async def let_in_at_last(limiter: Limiter, limits: Limits) -> None:
    for _ in range(300):
        if await tries(limiter, limits) is None:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it was never let in")


async def test_two_gateways_let_in_together_what_one_may(gateway: Make) -> None:
    (one, first), (two, second) = await gateway(), await gateway()
    limits = Limits(requests_per_minute=6)
    asked = [tries(who, limits) for _ in range(30) for who in (one, two)]
    answers = await asyncio.gather(*asked)  # all at once: the hardest case
    refused = [error for error in answers if error is not None]
    assert len(answers) - len(refused) == 6
    assert first.running("a") + second.running("a") == 6
    assert {error.code for error in refused} == {"rate_limit_exceeded"}
    assert all(0 < (error.retry_after_s or 0) <= 10 for error in refused)


async def test_tokens_are_counted_together_and_a_larger_prompt_takes_all_of_them(
    gateway: Make,
) -> None:
    (one, _), (two, _) = await gateway(), await gateway()
    limits = Limits(prompt_tokens_per_minute=1000)
    assert await tries(one, limits, 600) is None
    refused = await tries(two, limits, 600)
    assert refused is not None
    assert "1000 prompt tokens" in refused.message
    assert 0 < (refused.retry_after_s or 0) <= 12
    assert await tries(two, limits, 300) is None
    whole = await tries(two, limits, 5000)
    assert whole is not None
    assert (whole.retry_after_s or 0) > 40


async def test_what_runs_is_counted_over_all_until_it_ends(gateway: Make) -> None:
    (one, _), (two, _) = await gateway(), await gateway()
    limits = Limits(concurrent=3)
    answers = await asyncio.gather(*(tries(who, limits) for who in (one, two) * 5))
    let_in = [who for who, error in zip((one, two) * 5, answers, strict=True) if error is None]
    assert len(let_in) == 3
    assert {error.code for error in answers if error} == {"concurrency_limit"}
    let_in[0].leave("a")
    other = two if let_in[0] is one else one
    await let_in_at_last(other, limits)  # the other learns of it in a moment
    assert await tries(one, limits) is not None


async def test_a_gateway_that_died_holds_nothing_for_long(
    gateway: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharedlimits, "STALE_MS", 1500)
    monkeypatch.setattr(sharedlimits, "REFRESH_S", 0.2)
    (alive, _), (dying, _) = await gateway(), await gateway()
    limits = Limits(concurrent=2)
    assert await tries(alive, limits) is None
    assert await tries(dying, limits) is None
    assert await tries(alive, limits) is not None
    await dying.close()  # as a killed process: it tells nobody
    await let_in_at_last(alive, limits)
    assert await tries(alive, limits) is not None, "its own, told again and again, still counts"


@pytest.mark.parametrize("away", ["open", "closed"])
async def test_without_redis_requests_are_counted_here_or_refused(
    gateway: Make, redis: RedisServer, away: Literal["open", "closed"]
) -> None:
    proxy = RedisProxy(redis.port)
    try:
        limiter, meters = await gateway(proxy.url, away=away)
        limits = Limits(requests_per_minute=2)
        assert await tries(limiter, limits) is None
        proxy.refuse()
        await until(lambda: lost(limiter))
        if away == "closed":
            with pytest.raises(NoCapacity) as failure:
                await limiter.enter("a", limits, 1)
            assert failure.value.retry_after_s
            await limiter.enter("free", Limits(), 1)  # without limits there is nothing to check
        else:
            assert await tries(limiter, limits) is None  # one was noted, one more is let in
            assert await tries(limiter, limits) is not None
        assert meters.running("a") == (1 if away == "closed" else 2)
        proxy.accept()
        await until(lambda: limiter.shared)
    finally:
        proxy.close()


def lost(limiter: Limiter) -> bool:
    limiter._changed.add("a")  # something to tell, so that it notices
    limiter._work.set()
    return not limiter.shared


async def test_a_frozen_redis_costs_one_short_wait(
    gateway: Make, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = RedisProxy(redis.port)
    try:
        limiter, meters = await gateway(proxy.url)
        monkeypatch.setattr(sharedlimits, "WAIT_S", 0.2)
        limits = Limits(requests_per_minute=1000, concurrent=100)
        proxy.freeze()
        begun = Stopwatch()
        for _ in range(20):
            assert await tries(limiter, limits) is None
        assert begun.seconds() < 20 * 0.2, "only the first one waited"
        proxy.thaw()
        await until(lambda: limiter.shared)
        assert await tries(limiter, limits) is None
        for _ in range(21):
            limiter.leave("a")
        assert meters.running("a") == 0
        key = KEYS.limits("a")
        await until(lambda: told(redis, key) == ["0"])
    finally:
        proxy.close()


def told(redis: RedisServer, key: str) -> list[str]:
    """What Redis believes to run, by gateway."""
    pairs: dict[bytes, bytes] = talk(redis.port, "HGETALL", key)
    return [str(value.split()[0], "ascii") for name, value in pairs.items() if name[:2] == b"g:"]


async def test_who_leaves_while_it_waits_holds_nothing(gateway: Make, redis: RedisServer) -> None:
    limiter, meters = await gateway()
    limits = Limits(concurrent=100)
    for turn in range(30):
        task = asyncio.create_task(limiter.enter("a", limits, 1))
        for _ in range(turn % 6):
            await asyncio.sleep(0)
        task.cancel()
        if not (await asyncio.gather(task, return_exceptions=True))[0]:
            limiter.leave("a")
    await until(lambda: meters.running("a") == 0)
    await until(lambda: told(redis, KEYS.limits("a")) in ([], ["0"]))


async def test_nobody_elses_words_break_it(gateway: Make, redis: RedisServer) -> None:
    """A key of another kind, as after a mistake: counted here."""
    limiter, _ = await gateway()
    talk(redis.port, "SET", KEYS.limits("a"), "junk")
    limits = Limits(requests_per_minute=1)
    assert await tries(limiter, limits) is None
    assert await tries(limiter, limits) is not None
    assert limiter.shared


ACL = "resetchannels ~hw:{limits.* -@all +client|setname +time +cluster|slots +hgetall +pexpire"


@pytest.mark.parametrize("rights", ["+eval +hset +hdel +exists", ""])
async def test_with_the_documented_rights_and_with_fewer(
    gateway: Make, redis: RedisServer, rights: str
) -> None:
    talk(redis.port, "ACL", "SETUSER", "some", "on", ">pw", *ACL.split(), *rights.split())
    limiter, _ = await gateway(f"redis://some:pw@127.0.0.1:{redis.port}/0")
    limits = Limits(requests_per_minute=2, concurrent=9)
    assert [await tries(limiter, limits) for _ in range(2)] == [None, None]
    assert await tries(limiter, limits) is not None
    assert (talk(redis.port, "EXISTS", KEYS.limits("a")) == 1) is bool(rights)
    limiter.leave("a")
