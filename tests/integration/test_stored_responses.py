"""``previous_response_id``: what goes on from a stored response goes to the worker that has it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from caserig import check_error, counts, settles
from dialoguekit import (
    RESPONSES,
    Speaker,
    bearer,
    either_way,
    going_on,
    id_of,
    named,
    opening,
    place,
    request,
    say,
    script,
    spread,
    whole,
    words,
)
from rig import CLOSE, CUT, HANG, ask, chat, eventually, plain

TENANTS = {"listen.api_keys": "sk-one,sk-two", "tenancy.unisolated": "allow"}
BUSY = 6


async def fleet(stub: Any, n: int = 4, models: Sequence[str] = ("m",)) -> list[Speaker]:
    return [Speaker(await stub(models)) for _ in range(n)]


async def keep_busy(url: str, dial: Any, home: Speaker, previous: str, *headers: Any) -> None:
    """So many requests that go on from a response and are not answered."""
    before = len(home.stub.seen)
    home.play = [HANG]
    for number in range(BUSY):
        body = json.dumps(going_on(previous, f"and {number}?")).encode()
        await (await dial(url)).send("POST", RESPONSES, body, *headers)
    await eventually(lambda: len(home.stub.seen) == before + BUSY)
    home.play = None


@pytest.mark.parametrize("then", [False, True], ids=["then whole", "then stream"])
@either_way
async def test_it_goes_to_the_worker_that_gave_it(stub, serve, stream: bool, then: bool) -> None:
    rng = random.Random(1)
    served = await serve(*(each.stub for each in await fleet(stub)))
    given = await spread(served.url, rng, stream=stream)
    for _ in range(3):
        rng.shuffle(names := list(given))
        later = {}
        for name in names:
            body = going_on(name, words(rng, 3), stream=then)
            reply = await say(served.url, RESPONSES, body)
            assert place(reply) == given[name]
            later[id_of(reply)] = place(reply)
        given.update(later)  # and so on from any of them


@either_way
async def test_neither_load_nor_another_cache_changes_that(stub, serve, dial, stream: bool) -> None:
    rng = random.Random(2)
    speakers = await fleet(stub)
    served = await serve(*(each.stub for each in speakers))
    first = await say(served.url, RESPONSES, request(RESPONSES, [("user", "x")], stream=stream))
    home = next(each for each in speakers if each.stub.id == place(first))
    others = [each.stub for each in speakers if each is not home]
    before = counts(others)
    await keep_busy(served.url, dial, home, id_of(first))
    assert counts(others) == before
    # The words of the next turn are in the cache of another worker, which is idle.
    text = words(rng, 100)
    elsewhere = await say(served.url, RESPONSES, request(RESPONSES, [("user", text)]))
    assert place(elsewhere) != home.stub.id
    again = await say(served.url, RESPONSES, request(RESPONSES, [("user", text)]))
    assert place(again) == place(elsewhere)
    body = going_on(id_of(first), text, stream=stream)
    assert place(await say(served.url, RESPONSES, body)) == home.stub.id


@pytest.mark.parametrize("instead", ["unknown", "another tenant's", "in messages", "in chat"])
async def test_others_are_routed_as_any_request(stub, serve, dial, instead: str) -> None:
    """By load: its worker is the busiest."""
    speakers = await fleet(stub)
    served = await serve(*(each.stub for each in speakers), **TENANTS)
    one, two = bearer("sk-one"), bearer("sk-two")
    first = await say(served.url, RESPONSES, request(RESPONSES, [("user", "x")]), one)
    name = id_of(first)
    home = next(each for each in speakers if each.stub.id == place(first))
    await keep_busy(served.url, dial, home, name, one)
    path, body, key = {
        "unknown": (RESPONSES, going_on(f"{name}0", "y"), one),
        "another tenant's": (RESPONSES, going_on(name, "y"), two),
        "in messages": (
            "/v1/messages",
            {**request("/v1/messages", [("user", "y")]), "previous_response_id": name},
            one,
        ),
        "in chat": ("/v1/chat/completions", chat("y", previous_response_id=name), one),
    }[instead]
    for each in speakers:
        each.play = None if path != "/v1/chat/completions" else plain(b"{}")
    for _ in range(3):
        reply = await say(served.url, path, body, key)
        assert place(reply) != home.stub.id
    for each in speakers:
        each.play = None
    assert place(await say(served.url, RESPONSES, going_on(name, "y"), one)) == home.stub.id


async def test_two_tenants_may_have_responses_of_one_name(stub, serve) -> None:
    """Engines of two makes count as they like."""
    speakers = await fleet(stub)
    served = await serve(*(each.stub for each in speakers), **TENANTS)
    rng, homes = random.Random(3), {}
    for each in speakers:
        each.play = [*_answer("resp_1")]
    for key in ("sk-one", "sk-two"):
        for _ in range(20):
            body = request(RESPONSES, [("user", words(rng, 60))])
            homes[key] = place(await say(served.url, RESPONSES, body, bearer(key)))
            if len(set(homes.values())) == len(homes):
                break
    assert len(set(homes.values())) == 2
    for key in ("sk-one", "sk-two", "sk-one", "sk-two"):
        for _ in range(2):
            reply = await say(served.url, RESPONSES, going_on("resp_1", "y"), bearer(key))
            assert place(reply) == homes[key]


def _answer(name: Any) -> Any:
    body = json.dumps(whole(RESPONSES, name, None)).encode()
    return plain(body, 200, ("Content-Type", "application/json"))


@pytest.mark.parametrize("odd", [None, 0, True, "", "x" * 70_000, [], {}, ["resp_1"], "\ud83c"])
async def test_an_id_that_is_none_is_passed_on(stub, serve, odd: object) -> None:
    speakers = await fleet(stub, 2)
    served = await serve(*(each.stub for each in speakers))
    for each in speakers:
        each.play = _answer(odd)
    await say(served.url, RESPONSES, request(RESPONSES, [("user", "x")]))
    for stream in (False, True):
        body = json.dumps(going_on(odd, "y", stream=stream)).encode()
        await say(served.url, RESPONSES, body)
        assert body in [seen.body for each in speakers for seen in each.stub.seen]


BEGUN = opening(RESPONSES, "resp_9")
FAILED = named("response.failed", response={"id": "resp_9", "error": {"message": "no memory"}})
FAILURES: dict[str, Any] = {
    "500": plain(b"no", 500),
    "503": plain(b"no", 503),
    "reset": [CUT],
    "closed": [CLOSE],
    "ended before content": script(BEGUN),
    "cut before content": script(BEGUN, 0.02, CUT),
    "failed before content": script([*BEGUN, FAILED]),
    "refused": None,
}


@pytest.mark.parametrize("how", FAILURES)
async def test_its_failure_is_told_and_nobody_else_is_asked(stub, serve, how: str) -> None:
    speakers = await fleet(stub)
    # No probe tells of a worker that is gone before a request does.
    served = await serve(*(each.stub for each in speakers), **{"workers.health_interval_s": 600})
    given = await spread(served.url, random.Random(4))
    name, home = next(iter(given.items()))
    at = next(each for each in speakers if each.stub.id == home)
    others = [each.stub for each in speakers if each is not at]
    before = counts(others)
    stream = how.endswith("content")
    if how == "refused":
        await at.stub.stop()
    else:
        at.play = FAILURES[how]
    told = await ask(served.url, RESPONSES, going_on(name, "y", stream=stream))
    check_error(told, 500, 502, 503, 504)
    assert counts(others) == before
    if how != "refused":  # that one is known to be down until it is probed again
        at.play = None
        assert place(await say(served.url, RESPONSES, going_on(name, "y"))) == home
        assert counts(others) == before


async def test_a_refusal_of_its_worker_passes_as_it_is(stub, serve) -> None:
    speakers = await fleet(stub)
    served = await serve(*(each.stub for each in speakers))
    given = await spread(served.url, random.Random(5))
    name, home = next(iter(given.items()))
    at = next(each for each in speakers if each.stub.id == home)
    before = sum(counts([each.stub for each in speakers]))
    at.play = plain(b'{"error":{"message":"forgotten"}}', 404, ("Content-Type", "application/json"))
    reply = await ask(served.url, RESPONSES, going_on(name, "y"))
    assert (reply.status, reply.json["error"]["message"]) == (404, "forgotten")
    assert sum(counts([each.stub for each in speakers])) == before + 1


async def test_a_worker_that_has_lost_the_model_is_not_asked(stub, serve) -> None:
    speakers = await fleet(stub)
    served = await serve(*(each.stub for each in speakers))
    given = await spread(served.url, random.Random(6))
    name, home = next(iter(given.items()))
    at = next(each for each in speakers if each.stub.id == home)
    assert place(await say(served.url, RESPONSES, going_on(name, "y"))) == home
    at.stub.models = ("n",)

    def known() -> tuple[str, ...]:
        workers = served.gateway.router.workers(0.0)
        return next(tuple(one.models) for one in workers if one.id == home)

    await eventually(lambda: known() == ("n",))
    for _ in range(3):
        assert place(await say(served.url, RESPONSES, going_on(name, "y"))) != home
    # Which model goes on is the client's to say; the response is still there.
    reply = await say(served.url, RESPONSES, going_on(name, "y", model="n"))
    assert place(reply) == home


@pytest.mark.parametrize("state", ["draining", "down"])
async def test_without_its_worker_it_is_told_that_this_one_is_missing(
    stub, serve, state: str
) -> None:
    """Idle others do not help: "all workers were tried" would be wrong twice."""
    speakers = await fleet(stub)
    served = await serve(*(each.stub for each in speakers))
    given = await spread(served.url, random.Random(11))
    name, home = next(iter(given.items()))
    at = next(each for each in speakers if each.stub.id == home)
    if state == "draining":
        await ask(served.admin, f"/admin/workers/{home}/drain", b"")
    else:
        at.stub.healthy = False

    def seen_as() -> str:
        return next(str(one.state) for one in served.gateway.router.workers(0.0) if one.id == home)

    await eventually(lambda: seen_as() == state)
    before = [len(each.stub.seen) for each in speakers]
    reply = await ask(served.url, RESPONSES, going_on(name, "y"))
    check_error(reply, 503)
    assert reply.header("retry-after") == "1"
    told = await ask(served.admin, "/admin/explain", going_on(name, "y"))
    for message in (reply.json["error"]["message"], told.json["reject"]["message"]):
        assert "that gave the response" in message
        assert home not in message, "clients need not know its name"
    assert [len(each.stub.seen) for each in speakers] == before


# --- several gateways ----------------------------------------------------------------------------


async def followed(url: str, given: dict[str, str], *headers: tuple[str, str]) -> list[str]:
    """Those that did not go to their worker."""
    replies = [(n, await say(url, RESPONSES, going_on(n, "y"), *headers)) for n in given]
    return [name for name, reply in replies if place(reply) != given[name]]


@pytest.mark.redis
@either_way
async def test_another_gateway_of_the_same_redis_knows_it(
    stub, serve, redis_server, stream: bool
) -> None:
    stubs = [each.stub for each in await fleet(stub)]
    shared = {**TENANTS, "redis.url": redis_server.url}
    one, two = await serve(*stubs, **shared), await serve(*stubs, **shared)
    alone = await serve(*stubs, **TENANTS)
    mine, other = bearer("sk-one"), bearer("sk-two")
    given = await spread(one.url, random.Random(7), mine, stream=stream)

    async def all_known() -> bool:
        return not await followed(two.url, given, mine)

    await settles(all_known, 30.0)
    assert await followed(two.url, given, mine) == []
    # It is the Redis that tells it, and to that tenant alone.
    strangers = [
        await followed(alone.url, given, mine),
        await followed(two.url, given, other),
    ]
    assert all(strangers), strangers


@pytest.mark.redis
@pytest.mark.parametrize("how", ["stop", "freeze"])
async def test_without_its_redis_a_gateway_goes_by_what_it_knows(
    stub, serve, redis_server_factory, how: str
) -> None:
    redis = redis_server_factory("newest")
    stubs = [each.stub for each in await fleet(stub)]
    served = await serve(*stubs, **{"redis.url": redis.url})
    given = await spread(served.url, random.Random(8))
    getattr(redis, how)()
    try:
        assert await followed(served.url, given) == []
        given |= await spread(served.url, random.Random(9))
        assert await followed(served.url, given) == []
        await say(served.url, RESPONSES, going_on("resp_of_nobody", "y"))
        during = await spread(served.url, random.Random(12))
        redis.thaw() if how == "freeze" else redis.start()
        # Another gateway learns of what was given meanwhile, not only of later ones.
        other = await serve(*stubs, **{"redis.url": redis.url})

        async def all_known() -> bool:
            return not await followed(other.url, during)

        await settles(all_known, 30.0)
    finally:
        redis.thaw()


@pytest.mark.redis
@pytest.mark.parametrize("how", ["flush", "restart"])
async def test_a_redis_that_lost_all_is_told_again_who_gave_what(
    stub, serve, redis_server_factory, how: str
) -> None:
    """A gateway that never saw them finds each response's worker, without new traffic."""
    redis = redis_server_factory("newest")
    stubs = [each.stub for each in await fleet(stub)]
    shared = {"redis.url": redis.url}
    told = await serve(*stubs, **shared)
    given = await spread(told.url, random.Random(13))
    if how == "flush":
        await flush_all(redis.port)
    else:
        redis.stop()
        redis.start()
    other = await serve(*stubs, **shared)

    async def all_known() -> bool:
        return not await followed(other.url, given)

    await settles(all_known, 30.0)


async def flush_all(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"FLUSHALL\r\n")
    assert await reader.readline() == b"+OK\r\n"
    writer.close()
