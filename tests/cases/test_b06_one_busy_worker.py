"""B06: one overloaded worker is no reason to give up the affinity of the others."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from cachestub import Engine, asked, post, words
from caserig import COMPLETIONS, body_for, counts
from dialoguekit import ROUTES
from rig import CHAT, HANG, ROLE, SSE_HEAD, chunk, delta, eventually


async def homes(served: Any, stubs: list[Any], path: str, tokens: int) -> dict[str, str]:
    """A warm prefix for each of S2..S4, by the worker that holds it (which only it answers to)."""
    found: dict[str, str] = {}
    for seed in range(200):
        prefix = words(tokens, 7000 + seed)
        where = await post(served.url, prefix, path)
        if where != stubs[0].id:
            found.setdefault(where, prefix)
        if len(found) == 3:
            return found
    raise AssertionError("no worker is ever chosen")


@pytest.mark.parametrize(
    ("path", "tokens", "held", "script"),
    [
        (CHAT, 1000, 30, [HANG]),
        (CHAT, 1000, 30, [SSE_HEAD, chunk(ROLE + delta("x")), HANG]),
        (COMPLETIONS, 1000, 30, [HANG]),
        (CHAT, 200, 30, [HANG]),
        (CHAT, 1000, 200, [HANG]),
        *[(route, 1000, 30, [HANG]) for route in ROUTES],
    ],
    ids=["prefill", "decode", "completions", "short", "many", "responses", "messages"],
)
async def test_the_others_keep_their_prefixes(
    stub, serve, dial, path: str, tokens: int, held: int, script: list[Any]
) -> None:
    stubs = [await stub(("m", "only")), *[await stub(("m",)) for _ in range(3)]]
    for one in stubs:
        Engine(one, slots=8, service_s=0.005)
    served = await serve(*stubs)
    warm = await homes(served, stubs, path, tokens)
    stubs[0].respond = None
    stubs[0].plays(script)
    before = counts(stubs)[0]
    for number in range(held):
        client = await dial(served.url)
        body = {**asked(path, words(100, 100 + number), stream=True), "model": "only"}
        await client.send("POST", path, json.dumps(body).encode())
    await eventually(lambda: counts(stubs)[0] == before + held, 60)
    rng = Random(3)
    right = 0
    for number in range(30):
        home, prefix = rng.choice(sorted(warm.items()))
        where = await post(served.url, prefix + words(30, 4000 + number), path)
        right += where == home
    assert right >= 29, right


async def test_what_the_busy_worker_holds_goes_elsewhere_and_stays_there(stub, serve, dial) -> None:
    """Its own prefixes are the only ones that move."""
    stubs = [await stub(("m", "only")), *[await stub(("m",)) for _ in range(3)]]
    for one in stubs:
        Engine(one, slots=8, service_s=0.005)
    served = await serve(*stubs)
    prefix = ""
    for seed in range(200):
        prefix = words(800, seed)
        if await post(served.url, prefix) == stubs[0].id:
            break
    stubs[0].respond = None
    stubs[0].plays([HANG])
    before = counts(stubs)[0]
    for number in range(30):
        client = await dial(served.url)
        asked = {**body_for(CHAT, words(2000, 100 + number)), "model": "only"}
        await client.send("POST", CHAT, json.dumps(asked).encode())
    await eventually(lambda: counts(stubs)[0] == before + 30, 60)
    moved = [await post(served.url, prefix + words(20, n)) for n in range(8)]
    assert stubs[0].id not in moved
    assert len(set(moved)) == 1, "it has one new home"
