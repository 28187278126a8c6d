"""``/v1/responses/{id}``: what is asked about a stored response is asked where it is kept."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from caserig import check_error, counts, settles, total
from dialoguekit import (
    RESPONSES,
    Speaker,
    bearer,
    either_way,
    events_of,
    going_on,
    id_of,
    opening,
    place,
    request,
    say,
    spread,
    whole,
)
from rig import (
    CLOSE,
    CUT,
    END,
    HANG,
    SSE_HEAD,
    RawClient,
    Seen,
    answer,
    ask,
    chunk,
    eventually,
    head,
    plain,
)

from gateway.app import OTHER, OTHER_V1, route_of

TENANTS = {"listen.api_keys": "sk-one,sk-two", "tenancy.unisolated": "allow"}


class Keeper(Speaker):
    """A stub that keeps its responses."""

    def respond(self, seen: Seen) -> Any:
        if not seen.target.startswith(f"{RESPONSES}/") or self.play is not None:
            return super().respond(seen)
        name, _, part = seen.target.removeprefix(f"{RESPONSES}/").partition("?")[0].partition("/")
        if name not in self.given:
            return answer({"error": {"message": "not here", "code": "not_found"}}, 404)
        if seen.method == "DELETE":
            self.given.remove(name)
            return answer({"id": name, "object": "response", "deleted": True})
        if part == "input_items":
            return answer({"object": "list", "data": []})
        if "stream=true" in seen.target:
            events = events_of(RESPONSES, name, None)
            return [SSE_HEAD, *map(chunk, events), END]
        return answer(whole(RESPONSES, name, None))


async def fleet(stub: Any, n: int = 4, models: tuple[str, ...] = ("m",)) -> list[Keeper]:
    return [Keeper(await stub(models)) for _ in range(n)]


ASKED = [("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")]


async def about(url: str, name: str, method: str, part: str, *headers: tuple[str, str]) -> Any:
    body = b"" if method == "POST" else None
    return await ask(url, f"{RESPONSES}/{name}{part}", body, *headers, method=method)


@pytest.mark.parametrize(("method", "part"), ASKED)
@either_way
async def test_it_is_asked_of_the_worker_that_gave_it(
    stub, serve, method: str, part: str, stream: bool
) -> None:
    served = await serve(*(each.stub for each in await fleet(stub)))
    given = await spread(served.url, random.Random(1), stream=stream)
    for name, home in given.items():
        reply = await about(served.url, name, method, part)
        assert (reply.status, place(reply)) == (200, home)
    seen = [one for each in served.stubs for one in each.seen if one.target != RESPONSES]
    assert {one.method for one in seen} == {method}
    assert {one.target.split("/", 4)[3] for one in seen} == set(given)
    route = f"/v1/responses/{{id}}{part}"
    count = await total(served.admin, "headwater_requests_total", route=route, code="200")
    assert count == len(given)


async def test_the_query_goes_with_it_and_a_stream_comes_as_it_is(stub, serve) -> None:
    served = await serve(*(each.stub for each in await fleet(stub)))
    given = await spread(served.url, random.Random(1))
    name, home = next(iter(given.items()))
    reply = await ask(served.url, f"{RESPONSES}/{name}?stream=true&starting_after=2")
    assert (reply.status, place(reply), reply.complete) == (200, home, True)
    assert reply.body == b"".join(events_of(RESPONSES, name, None))
    asked = next(each for each in served.stubs if each.id == home).seen[-1]
    assert asked.target.endswith("?stream=true&starting_after=2")


async def test_a_reader_that_left_asks_for_the_rest_where_it_is(stub, serve, dial) -> None:
    """A stream's id is known from its first event on, not only at its end."""
    keepers = await fleet(stub)
    served = await serve(*(each.stub for each in keepers))
    name = "resp_long"
    begun = events_of(RESPONSES, name, None)[: len(opening(RESPONSES, name)) + 1]
    for each in keepers:
        each.play = [SSE_HEAD, *map(chunk, begun), HANG]
    client: RawClient = await dial(served.url)
    body = json.dumps(request(RESPONSES, [("user", "x")], stream=True, background=True))
    await client.send("POST", RESPONSES, body.encode())
    reply = await client.read(bodyless=True)
    home = next(each for each in keepers if each.stub.id == place(reply))
    for each in keepers:
        each.play = None
    home.given.append(name)
    assert place(await about(served.url, name, "GET", "")) == home.stub.id
    client.abort()
    await eventually(lambda: home.stub.seen[0].closed_at)
    for _ in range(3):
        assert place(await about(served.url, name, "GET", "")) == home.stub.id
        assert place(await say(served.url, RESPONSES, going_on(name, "y"))) == home.stub.id


@pytest.mark.parametrize("how", [[CUT], [CLOSE], answer({"error": {"message": "no"}}, 500)])
async def test_nobody_else_is_asked_when_its_worker_fails(stub, serve, how: Any) -> None:
    keepers = await fleet(stub)
    served = await serve(*(each.stub for each in keepers))
    name, home = next(iter((await spread(served.url, random.Random(1))).items()))
    at = next(each for each in keepers if each.stub.id == home)
    others = [each.stub for each in keepers if each is not at]
    before, at.play = counts(others), how
    check_error(await about(served.url, name, "GET", ""), 500, 502, 503)
    assert counts(others) == before


async def test_an_answer_without_a_body_is_framed_as_one(stub, serve, dial) -> None:
    """204: what follows on the connection is the next answer."""
    keepers = await fleet(stub, 1)
    served = await serve(keepers[0].stub)
    reply = await say(served.url, RESPONSES, request(RESPONSES, [("user", "x")]))
    keepers[0].play = [head(204)]
    client: RawClient = await dial(served.url)
    for path, method in ((f"{RESPONSES}/{id_of(reply)}", "DELETE"), ("/v1/other", "POST")):
        for _ in range(2):
            told = await client.ask(method, path, b"{}")
            assert (told.status, told.body) == (204, b"")
            assert told.header("transfer-encoding") is None
            assert told.header("content-length") is None
    assert (await client.ask("GET", "/health")).status == 200


async def test_what_nobody_knows(stub, serve) -> None:
    """One model: its workers say that they do not have it. With two nobody is asked."""
    one = await serve(*(each.stub for each in await fleet(stub, 2)))
    reply = await about(one.url, "resp_none", "GET", "")
    assert (reply.status, reply.json["error"]["message"]) == (404, "not here")
    keepers = [*await fleet(stub, 1, ("m",)), *await fleet(stub, 1, ("n",))]
    two = await serve(*(each.stub for each in keepers))
    for method, part in ASKED:
        check_error(await about(two.url, "resp_none", method, part), 404)
    assert counts(two.stubs) == [0, 0]
    given = await say(two.url, RESPONSES, request(RESPONSES, [("user", "x")], model="n"))
    reply = await about(two.url, id_of(given), "GET", "")
    assert (reply.status, place(reply)) == (200, keepers[1].stub.id)
    check_error(await about((await serve()).url, "resp_none", "GET", ""), 404)


async def test_another_tenants_response_is_not_there(stub, serve) -> None:
    served = await serve(*(each.stub for each in await fleet(stub, 2)), **TENANTS)
    mine, other = bearer("sk-one"), bearer("sk-two")
    name, home = next(iter((await spread(served.url, random.Random(1), mine)).items()))
    before = counts(served.stubs)
    for method, part in ASKED:
        check_error(await about(served.url, name, method, part, other), 404)
    assert counts(served.stubs) == before
    assert place(await about(served.url, name, "GET", "", mine)) == home


async def test_other_methods_are_refused(stub, serve) -> None:
    served = await serve(*(each.stub for each in await fleet(stub, 1)))
    for part, method, allowed in (
        ("", "PUT", "GET, DELETE"),
        ("", "HEAD", "GET, DELETE"),
        ("/cancel", "GET", "POST"),
        ("/input_items", "POST", "GET"),
    ):
        target = f"{RESPONSES}/resp_x{part}"
        reply = await ask(served.url, target, None, method=method, bodyless=method == "HEAD")
        assert (reply.status, reply.header("allow")) == (405, allowed)
    assert counts(served.stubs) == [0]


def test_paths_that_name_no_stored_response() -> None:
    assert route_of("/v1/responses/compact", "POST") == OTHER_V1
    assert route_of("/v1/responses/resp_1/other", "GET") == OTHER_V1
    for path in (
        "/v1/responses/",
        "/v1/responses/..",
        "/v1/responses/%2e%2e",
        "/v1/responses/./cancel",
    ):
        assert route_of(path, "GET") == OTHER, path
    for path in ("/v1/responses/a%2fb", "/v1/responses/a/cancel/", "/v1/responses/a;b"):
        assert route_of(path, "GET") in (OTHER, OTHER_V1), path


@pytest.mark.redis
async def test_another_gateway_of_the_same_redis_finds_it(stub, serve, redis_server) -> None:
    stubs = [each.stub for each in await fleet(stub)]
    shared = {"redis.url": redis_server.url}
    one, two = await serve(*stubs, **shared), await serve(*stubs, **shared)
    given = await spread(one.url, random.Random(1))

    async def all_known() -> bool:
        asked = [about(two.url, name, "GET", "") for name in given]
        replies = await asyncio.gather(*asked)
        return [place(reply) for reply in replies] == list(given.values())

    await settles(all_known, 30.0)


ODD = {
    "html": plain(b"<html>hi</html>", 200, ("Content-Type", "text/html; charset=utf-8")),
    "text": plain(b"Internal Server Error", 200, ("Content-Type", "text/plain")),
    "half of it": plain(b'{"id":', 200, ("Content-Type", "application/json")),
    "a list": plain(b"[]", 200, ("Content-Type", "application/json")),
    "an error": plain(b'{"error":{"message":"x"}}', 200, ("Content-Type", "application/json")),
}


@pytest.mark.parametrize("how", ODD)
@pytest.mark.parametrize(("method", "part"), ASKED)
async def test_what_is_no_answer_is_a_502(stub, serve, how: str, method: str, part: str) -> None:
    keepers = await fleet(stub)
    served = await serve(*(each.stub for each in keepers))
    name = id_of(await say(served.url, RESPONSES, request(RESPONSES, [("user", "x")])))
    for each in keepers:
        each.play = ODD[how]
    check_error(await about(served.url, name, method, part), 502)


async def test_a_response_that_failed_is_an_answer(stub, serve) -> None:
    """Its error is what is asked for, and tells nothing about the worker."""
    (keeper,) = await fleet(stub, 1)
    served = await serve(keeper.stub)
    name = id_of(await say(served.url, RESPONSES, request(RESPONSES, [("user", "x")])))
    failed = {"id": name, "status": "failed", "error": {"code": "server_error", "message": "boom"}}
    keeper.play = answer(failed)
    for _ in range(3):
        reply = await about(served.url, name, "GET", "")
        assert (reply.status, reply.json) == (200, failed)
