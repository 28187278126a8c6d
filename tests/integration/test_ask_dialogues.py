"""What ``explain`` and ``index who`` say of Responses and Messages is what then happens."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from dialoguekit import (
    MESSAGES,
    RESPONSES,
    ROUTES,
    SYSTEM,
    TURNS,
    Speaker,
    base,
    bearer,
    going_on,
    id_of,
    matched,
    place,
    request,
    say,
    words,
)
from ledgerkit import headwater
from rig import Reply, ask

EXPLAIN, WHO = "/admin/explain", "/admin/index/who"
TENANTS = {"listen.api_keys": "sk-one,sk-two", "tenancy.unisolated": "allow"}
NAMES = {"route": True, "guessed": False}
either_route = pytest.mark.parametrize("route", ROUTES)
named_or_not = pytest.mark.parametrize("named", NAMES.values(), ids=NAMES)


async def of(admin: str, path: str, body: dict[str, Any], **more: Any) -> Any:
    """The answer of an admin route about a body."""
    reply: Reply = await ask(admin, path, {**body, **more})
    assert reply.status == 200, reply.body
    return reply.json


def tokens(told: Any) -> dict[str, int]:
    """Worker -> what it holds, of either answer."""
    if "holders" in told:
        return {one["id"]: one["tokens"] for one in told["holders"]}
    return {one["id"]: one["matched_tokens"] for one in told["workers"]}


@pytest.mark.parametrize("parts", [False, True], ids=["strings", "parts"])
@named_or_not
@either_route
async def test_what_is_told_is_what_happens(
    stub, serve, route: str, named: bool, parts: bool
) -> None:
    speakers = [Speaker(await stub()) for _ in range(3)]
    served = await serve(*(each.stub for each in speakers))
    body = request(route, TURNS, SYSTEM, parts=parts)
    more = {"route": route} if named else {}
    cold = await of(served.admin, EXPLAIN, body, **more)
    assert set(tokens(cold).values()) == {0}
    assert cold["request"]["blocks"] > 0
    home = place(await say(served.url, route, body))
    later = request(route, [*TURNS, ("assistant", "Yes."), ("user", "Sure?")], SYSTEM, parts=parts)
    told = await of(served.admin, EXPLAIN, later, **more)
    held = await of(served.admin, WHO, later, **more)
    assert told["choice"] == home == held["holders"][0]["id"]
    assert tokens(told) == tokens(held)
    reply = await say(served.url, route, later)
    assert (place(reply), matched(reply)) == (home, tokens(told)[home])
    assert matched(reply) > 0


@pytest.mark.parametrize(
    ("named", "is_one"),
    [("responses", True), ("messages", True), ("/v1/embeddings", False), (7, False)],
)
async def test_routes_by_their_names(stub, serve, named: object, is_one: bool) -> None:
    served = await serve(Speaker(await stub()).stub)
    body = {**base(MESSAGES), **base(RESPONSES), "route": named}
    for path in (EXPLAIN, WHO):
        reply = await ask(served.admin, path, body)
        assert reply.status == (200 if is_one else 400)
        assert is_one or reply.json["error"]["param"] == "route"


@either_route
async def test_tenants_and_salts_are_kept_apart_there_too(stub, serve, route: str) -> None:
    served = await serve(Speaker(await stub()).stub, **TENANTS)
    body = base(route)
    await say(served.url, route, body, bearer("sk-one"))
    for more, found in (
        ({"tenant": "key1"}, True),
        ({"tenant": "key2"}, False),
        ({}, False),
        ({"tenant": "key1", "cache_salt": "mine"}, False),
    ):
        for path in (EXPLAIN, WHO):
            told = await of(served.admin, path, body, route=route, **more)
            assert [count > 0 for count in tokens(told).values()] == [found], (path, more)


async def test_what_goes_on_is_told_to_go_to_its_giver(stub, serve) -> None:
    """For the tenant who was given the response, and for nobody else."""
    rng = random.Random(1)
    served = await serve(*[Speaker(await stub()).stub for _ in range(4)], **TENANTS)
    for _ in range(6):
        first = await say(
            served.url, RESPONSES, request(RESPONSES, [("user", words(rng, 9))]), bearer("sk-one")
        )
        body = going_on(id_of(first), "and?")
        told = await of(served.admin, EXPLAIN, body, tenant="key1")
        assert told["choice"] == place(first) == told["request"]["previous_worker"]
        assert [one["id"] for one in told["workers"]] == [place(first)]
        others = await of(served.admin, EXPLAIN, body, tenant="key2")
        assert (others["request"]["previous_worker"], len(others["workers"])) == (None, 4)
    plain = await of(served.admin, EXPLAIN, base(RESPONSES), tenant="key1")
    assert "previous_worker" not in plain["request"]


@either_route
async def test_without_a_model_as_without_the_question(stub, serve, route: str) -> None:
    body = {name: value for name, value in base(route).items() if name != "model"}
    alone = await serve(Speaker(await stub()).stub)
    for path in (EXPLAIN, WHO):
        assert (await of(alone.admin, path, body, route=route))["request"]["model"] == "m"
    two = await serve(Speaker(await stub(("m", "n"))).stub)
    for path in (EXPLAIN, WHO):
        reply = await ask(two.admin, path, {**body, "route": route})
        assert (reply.status, reply.json["error"]["param"]) == (400, "model")
    told = await of(two.admin, EXPLAIN, {**body, "model": "x"}, route=route)
    assert told["reject"]["code"] == "model_not_found"
    assert (await ask(two.admin, WHO, {**body, "model": "x"})).status == 404


@pytest.mark.parametrize("command", [("explain",), ("index", "who")], ids=" ".join)
@named_or_not
@either_route
async def test_the_commands(
    stub, serve, tmp_path: Path, capsys, route: str, named: bool, command: tuple[str, ...]
) -> None:
    served = await serve(Speaker(await stub()).stub)
    body = request(route, TURNS, SYSTEM)
    await say(served.url, route, body)
    file = tmp_path / "ein Gespräch.json"
    file.write_text(json.dumps(body))
    options = ("--route", route.removeprefix("/v1/")) if named else ()
    arguments = (*command, file, *options, "--url", served.admin)
    capsys.readouterr()
    assert await asyncio.to_thread(headwater, *arguments, "--format", "json") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("20")]
    told = json.loads("\n".join(lines))
    assert min(tokens(told).values()) > 0
    assert await asyncio.to_thread(headwater, *arguments) == 0
    text = capsys.readouterr().out
    assert " 0 prompt tokens" not in text, "they are not counted, which is not none"
    assert f"{next(iter(tokens(told).values())):,}" in text


async def test_a_command_tells_where_it_goes_on(stub, serve, tmp_path: Path, capsys) -> None:
    served = await serve(Speaker(await stub()).stub)
    first = await say(served.url, RESPONSES, base(RESPONSES))
    file = tmp_path / "next.json"
    for previous, says in (
        (id_of(first), f"Goes on from a response that {place(first)} gave"),
        ("resp_nobody", "Nobody knows who gave the response that it goes on from"),
    ):
        file.write_text(json.dumps({"model": "m", "previous_response_id": previous}))
        assert await asyncio.to_thread(headwater, "explain", file, "--url", served.admin) == 0
        assert says in capsys.readouterr().out
