"""Responses and Messages go to where their conversation is.

What counts of a prompt and what does not, what is known of it to whom, what answers say about it,
and what the ledger has of it. Stored responses (``previous_response_id``):
``test_stored_responses.py``.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from caserig import check_error, counts
from dialoguekit import (
    ANSWER,
    CACHED,
    FORMS,
    MESSAGES,
    RESPONSES,
    ROUTES,
    Counts,
    Speaker,
    bearer,
    events_of,
    item_of,
    matched,
    place,
    rendered,
    request,
    say,
    script,
    told,
    usage_of,
    whole,
    words,
)
from rig import END, answer, ask, chunk, head, plain

from gateway.engines import plain as plainengine
from gateway.engines.base import Salting
from gateway.report import read_ledger, summarise

KEYS = {"listen.api_keys": "sk-one,sk-two"}
either_route = pytest.mark.parametrize("route", ROUTES)
either_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


# --- conversations -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@either_way
@either_route
async def test_a_conversation_stays_where_it_began(
    stub, serve, route: str, stream: bool, form: str
) -> None:
    rng = random.Random(1)
    speakers = [Speaker(await stub()) for _ in range(4)]
    served = await serve(*(each.stub for each in speakers))
    talks: list[Any] = [(words(rng, 60), [], []) for _ in range(8)]
    for turn in range(4):
        for system, turns, places in talks:
            before = len(rendered(request(route, turns, system))) if turns else 0
            turns.append(("user", words(rng, 30)))
            parts = form == "parts" or (form == "mixed" and turn % 2 == 1)
            body = request(route, turns, system, parts=parts, stream=stream)
            reply = await say(served.url, route, body)
            places.append(place(reply))
            most = len(rendered(body)) // 4
            assert before // 8 <= matched(reply) <= most, (turn, before, most)
            assert before or matched(reply) == 0
            turns.append(("assistant", ANSWER))
    homes = [set(places) for _, _, places in talks]
    assert all(len(home) == 1 for home in homes), homes
    assert len(set().union(*homes)) > 1, "new conversations are spread"


@either_way
@either_route
async def test_a_packed_answer_passes_as_it_is_and_its_conversation_stays(
    stub, serve, route: str, stream: bool
) -> None:
    rng = random.Random(2)
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    usage = usage_of(route, Counts(900, 0))
    clear = b"".join(events_of(route, "r", usage)) if stream else answer(whole(route, "r", usage))
    packed = gzip.compress(clear if isinstance(clear, bytes) else clear[0].split(b"\r\n\r\n")[1])
    kind = "text/event-stream" if stream else "application/json"
    names = (("Content-Type", kind), ("Transfer-Encoding", "chunked"), ("Content-Encoding", "gzip"))
    for worker in workers:
        worker.plays([head(200, *names), chunk(packed), END])
    for _ in range(4):
        turns = [("user", words(rng, 100))]
        homes = set()
        for _ in range(3):
            body = request(route, turns, stream=stream)
            reply = await say(served.url, route, body, ("Accept-Encoding", "gzip"))
            assert reply.body in (packed, gzip.decompress(packed))
            homes.add(place(reply))
            turns += [("assistant", ANSWER), ("user", words(rng, 10))]
        assert len(homes) == 1


# --- what counts of a prompt ---------------------------------------------------------------------


def with_tools(route: str, **more: Any) -> list[dict[str, Any]]:
    text = words(random.Random(3), 40)
    if route == MESSAGES:
        return [{"name": "f", "description": text, "input_schema": {"type": "object"}, **more}]
    return [{"type": "function", "name": "f", "description": text, "parameters": {}, **more}]


SYSTEM = words(random.Random(4), 60)
TURNS = [
    ("user", words(random.Random(5), 60)),
    ("assistant", "naïve 🌍 " + words(random.Random(6), 60)),
    ("user", words(random.Random(7), 60)),
]


def base(route: str, **more: Any) -> dict[str, Any]:
    return request(route, TURNS, SYSTEM, **{"tools": with_tools(route), **more})


def unsaid(route: str) -> dict[str, bytes]:
    """Other bodies that say the same."""
    body = base(route)
    turns = "messages" if route == MESSAGES else "input"
    marked = [item_of(route, turn, at + 7, True, True) for at, turn in enumerate(TURNS)]
    values: dict[str, Any] = {
        "parts": base(route, parts=True),
        "other marks, ids and states": {**body, turns: marked},
        "sampling": {**body, "temperature": 0.5, "metadata": {"a": "b"}, "top_p": 0.9, "user": "u"},
        "limits": {**body, "max_tokens": 77, "max_output_tokens": 77},
        "streamed": {**body, "stream": True},
        "order of fields": dict(reversed(body.items())),
    }
    if route == MESSAGES:
        system = [{"type": "text", "text": SYSTEM, "cache_control": CACHED}]
        values["marked system"] = {**body, "system": system}
        values["marked tools"] = {**body, "tools": with_tools(route, cache_control=CACHED)}
    else:
        typed = [{"type": "message", "status": "completed", **item} for item in body[turns]]
        values["typed items"] = {**body, turns: typed}
    texts = {name: json.dumps(value).encode() for name, value in values.items()}
    texts["no escapes"] = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    texts["white space"] = json.dumps(body, indent=3).encode()
    return texts


def said(route: str) -> dict[str, tuple[dict[str, Any], str, str]]:
    """Other prompts: with the last thing before the difference, and the first behind it."""
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://a/b"}}
    if route == RESPONSES:
        image = {"type": "input_image", "image_url": "http://a/b"}
    shown = [("user", [image]), *TURNS[1:]]  # type: ignore[list-item]
    renamed = [("assistant", TURNS[0][1]), *TURNS[1:]]
    return {
        "tools": (base(route, tools=[{**with_tools(route)[0], "name": "g"}]), "", "tools"),
        "no tools": (base(route, tools=[]), "", "tools"),
        "system": (request(route, TURNS, "x" + SYSTEM, tools=with_tools(route)), "tools", "system"),
        "no system": (request(route, TURNS, tools=with_tools(route)), "tools", "system"),
        "a picture": ({**base(route), **_turns(route, shown)}, "system", "first"),
        "a role": ({**base(route), **_turns(route, renamed)}, "system", "first"),
        "the last turn": (
            request(
                route, [*TURNS[:2], ("user", "x" + TURNS[2][1])], SYSTEM, tools=with_tools(route)
            ),
            "first",
            "last",
        ),
    }  # fmt: skip


def _turns(route: str, turns: Any) -> dict[str, Any]:
    named = request(route, turns)
    return {name: named[name] for name in ("messages", "input") if name in named}


@either_route
async def test_what_is_not_said_does_not_count(stub, serve, route: str) -> None:
    served = await serve(Speaker(await stub()).stub)
    assert matched(await say(served.url, route, base(route))) == 0
    full = matched(await say(served.url, route, base(route)))
    assert full * 4 > 0.9 * len(rendered(base(route)))
    found = {name: matched(await say(served.url, route, b)) for name, b in unsaid(route).items()}
    assert set(found.values()) == {full}, found


@either_route
async def test_what_is_said_counts_from_where_it_stands(stub, serve, route: str) -> None:
    """Tools come first, then the system's text, then the turns."""
    for name, (body, behind, before) in said(route).items():
        worker = Speaker(await stub())
        served = await serve(worker.stub)
        await say(served.url, route, base(route))
        ends = {"": 0, "tools": len(with_tools(route)[0]["description"])}
        ends["system"] = ends["tools"] + len(SYSTEM)
        ends["first"] = ends["system"] + len(TURNS[0][1])
        ends["last"] = len(rendered(base(route)))
        found = 4 * matched(await say(served.url, route, body))
        # A block may be cut by the difference; names of fields and roles are some bytes more.
        assert ends[behind] - 64 <= found, name
        assert found < ends[before] if behind else found == 0, (name, found)


@either_route
async def test_the_string_is_one_part_of_one_message(stub, serve, route: str) -> None:
    """The first turn in each way in which it can be put."""
    served = await serve(Speaker(await stub()).stub)
    text = words(random.Random(8), 100)
    forms = [request(route, [("user", text)]), request(route, [("user", text)], parts=True)]
    if route == RESPONSES:
        forms.append({**forms[0], "input": [{"role": "user", "content": text}]})
    first, *others = [matched(await say(served.url, route, body)) for body in (*forms, forms[0])]
    assert first == 0
    assert len(set(others)) == 1
    assert others[0] * 4 > 0.9 * len(text)


# --- to whom it is known -------------------------------------------------------------------------


@either_way
@either_route
async def test_tenants_salts_and_models_share_no_keys(
    stub, serve, route: str, stream: bool
) -> None:
    speaker = Speaker(await stub(("m", "n")))
    served = await serve(speaker.stub, **KEYS, **{"tenancy.unisolated": "allow"})
    body = request(route, TURNS, SYSTEM, stream=stream)
    for key, other in (
        ("sk-one", {}),
        ("sk-two", {}),
        ("sk-one", {"cache_salt": "mine"}),
        ("sk-two", {"cache_salt": "mine"}),
        ("sk-one", {"model": "n"}),
    ):
        found = [
            matched(await say(served.url, route, {**body, **other}, bearer(key))) for _ in "12"
        ]
        assert found[0] == 0, (key, other)
        assert found[1] > 0, (key, other)


@either_route
async def test_without_isolation_tenants_share(stub, serve, route: str) -> None:
    served = await serve(Speaker(await stub()).stub, **KEYS, **{"tenancy.isolation": "off"})
    await say(served.url, route, base(route), bearer("sk-one"))
    assert matched(await say(served.url, route, base(route), bearer("sk-two"))) > 0


# --- what answers say about it -------------------------------------------------------------------


@pytest.mark.parametrize("figure", [0, None], ids=["told none", "told nothing"])
@either_way
@either_route
async def test_what_answers_say_corrects_what_is_believed(
    stub, serve, route: str, stream: bool, figure: int | None
) -> None:
    """An engine that was started anew says so; one that leaves the figure out says nothing."""
    rng = random.Random(9)
    speaker = Speaker(await stub())
    served = await serve(speaker.stub)
    prompts = [request(route, [("user", words(rng, 100))], stream=stream) for _ in range(8)]
    for body in prompts:
        assert matched(await say(served.url, route, body)) == 0
    speaker.cache.clear()
    speaker.says = lambda found: figure
    for body in prompts[:3]:
        assert matched(await say(served.url, route, body)) > 0 or figure == 0
    found = [matched(await say(served.url, route, body)) for body in prompts[3:6]]
    if figure is None:
        assert all(tokens > 100 for tokens in found), found
    else:
        assert found == [0, 0, 0]


TELLS = {
    RESPONSES: ({}, {"ends": "response.incomplete"}),
    MESSAGES: ({}, {"told": "twice"}, {"told": "end"}),
}


@either_way
@either_route
async def test_the_ledger_has_what_answers_say(
    stub, serve, tmp_path: Path, route: str, stream: bool
) -> None:
    worker = await stub()
    served = await serve(worker, **{"ledger.dir": str(tmp_path)})
    asked: list[Counts] = []
    for at, figures in enumerate(
        [Counts(1000, 640, 7), Counts(1000, 0, 7), Counts(1000, None, 7), Counts(900, 320, 5, 100)]
    ):
        for more in TELLS[route] if stream else ({},):
            worker.plays(told(route, stream, "r", usage_of(route, figures), **more))
            text = words(random.Random(f"{at} {more}"), 50)
            await say(served.url, route, request(route, [("user", text)], stream=stream))
            asked.append(figures)
    await served.gateway.close()
    records = list(read_ledger([tmp_path]))
    assert [
        (one.flow.prompt, one.flow.delivered, one.output_tokens, one.reported) for one in records
    ] == [(c.prompt, c.cached or 0, c.output, c.cached is not None) for c in asked]
    assert {(one.model, one.worker, one.status, str(one.outcome)) for one in records} == {
        ("m", worker.id, 200, "ok")
    }


NUMBERS = [None, -1, 2**40, 2**70, 1.5, float("nan"), True, "7", [], {}]


@either_way
@either_route
async def test_no_odd_answer_is_changed_or_spoils_the_ledger(
    stub, serve, tmp_path: Path, route: str, stream: bool
) -> None:
    worker = await stub()
    served = await serve(worker, **{"ledger.dir": str(tmp_path)})
    good = usage_of(route, Counts(1000, 640))
    usages: list[Any] = [*NUMBERS, usage_of(route, Counts(10, 640)), {"input_tokens": 5}]
    usages += [{**good, name: number} for name in good for number in NUMBERS]
    details = [{"cached_tokens": number} for number in NUMBERS]
    usages += [{**good, "input_tokens_details": each} for each in details]
    names: list[Any] = ["r", "", "r" * 70_000, "a\r\nb: c", *NUMBERS]
    odd = [(each, "r") for each in usages] + [(good, name) for name in names]
    for usage, name in odd:
        events = events_of(route, name, usage, told="twice")
        worker.plays(script(events) if stream else answer(whole(route, name, usage)))
        reply = await say(served.url, route, request(route, TURNS, stream=stream))
        wanted = b"".join(events) if stream else json.dumps(whole(route, name, usage)).encode()
        assert reply.body == wanted, (usage, name)
    await served.gateway.close()
    for record in read_ledger([tmp_path]):
        record.flow.check()
    assert summarise([tmp_path]).totals["requests"] == len(odd)


# --- bodies pass as they are ---------------------------------------------------------------------

DEEP = 100_000
RAW = [
    b'{"model":"m","input":"x","messages":[{"role":"user","content":"x"}],"max_tokens":5}',
    b' {\n"model" : "m", "input":"\\u0041\\ud83c\\udf0d \xf0\x9f\x8c\x8d", "n":1e400, "o":-0.0} ',
    b'{"input":"a","model":"x","input":"b","messages":null,"model":"m","x":123456789012345678901}',
    b'{"model":"m","input":[{"role":"user","content":[{"type":"text","text":"\\ud83c"}]}],"z":{}}',
    b'{"model":"m","tools":[{"a":123456789012345678901234567890,"b":NaN,"c":"\\udc00"}],"input":"x"}',
    b'{"model":"m","input":' + b"[" * DEEP + b"]" * DEEP + b"}",
    b'{"model":"m","messages":' + b'[{"content":' * DEEP + b"1" + b"}]" * DEEP + b"}",
]
NO_OBJECT = [
    b"",
    b"nonsense",
    b"[]",
    b"null",
    b'"x"',
    b"7",
    b"{",
    b'{"model":"m\xff"}',
    b"[" * DEEP,
]
PARTS: list[Any] = [
    *(None, 0, 1.5, True, "x", [], {}, {"type": "text"}, {"type": "text", "text": None}),
    *({"type": "input_text", "text": 5}, {"type": "output_text", "text": ["x"]}, {"text": "x"}),
    *({"type": ["text"], "text": "x"}, {"type": {"a": 1}}, {"type": None, "cache_control": 7}),
]
ODD: list[Any] = [
    *(None, 0, -1, 2**70, 1.5, True, False, "", "x", "\ud83c", "x" * 9999, [], {}, [[]], [None]),
    *([0], ["x"], [{}], {"role": "user"}, [{"role": None, "content": "x"}], [{"content": None}]),
    *([{"role": 1, "content": 2}], [{"role": ["user"], "content": {}}], [{"type": "message"}]),
    *([{"role": "user", "content": [part]}] for part in PARTS),
    [{"role": "user", "content": PARTS}],
    PARTS,
]
FIELDS = (
    *("input", "messages", "tools", "instructions", "system", "previous_response_id", "stream"),
    *("cache_salt", "prompt_cache_key", "max_output_tokens", "max_tokens"),
)


@either_route
async def test_any_body_reaches_a_worker_byte_for_byte(stub, serve, route: str) -> None:
    worker = await stub()
    worker.plays(told(route, False, "r", usage_of(route, Counts(9, 0))))
    served = await serve(worker)
    bodies = [*RAW, *NO_OBJECT]
    bodies += [json.dumps({**base(route), f: value}).encode() for f in FIELDS for value in ODD]
    for body in bodies:
        reply = await ask(served.url, route, body)
        assert reply.status == 200, (body[:300], reply.body)
        assert worker.seen[-1].body == body, body[:300]
    assert len(worker.seen) == len(bodies)
    worker.plays(plain(b'{"type":"error"}', 400, ("Content-Type", "application/json")))
    assert (await ask(served.url, route, bodies[0])).status == 400, "its own refusal"


@either_route
async def test_without_any_model_it_is_refused(stub, serve, route: str) -> None:
    worker = await stub(("m", "n"))
    served = await serve(worker)
    body = {name: value for name, value in base(route).items() if name != "model"}
    bodies = [*NO_OBJECT, json.dumps(body).encode()]
    names = [*(value for value in ODD if not isinstance(value, str)), ""]
    bodies += [json.dumps({**body, "model": name}).encode() for name in names]
    for raw in bodies:
        check_error(await ask(served.url, route, raw), 400)
    assert worker.seen == []


@either_way
@either_route
async def test_tenants_bodies_are_changed_in_their_salt_only(
    stub, serve, monkeypatch, route: str, stream: bool
) -> None:
    monkeypatch.setattr(plainengine.PlainEngine, "salting", Salting.ROOT)
    workers = [Speaker(await stub()).stub for _ in range(2)]
    served = await serve(*workers, **KEYS)
    salted = re.compile(rb'"cache_salt"\s*:\s*"([^"]*)"')
    salts = set()
    for key in ("sk-one", "sk-two"):
        for own in ("", '"cache_salt" :  "mine" ,'):
            text = json.dumps({**base(route, stream=stream), "big": 2**70}, indent=1)
            body = text.replace("{", "{" + own, 1).encode()
            before = counts(workers)
            await say(served.url, route, body, bearer(key))
            seen = next(w.seen[-1] for w, n in zip(workers, before, strict=True) if len(w.seen) > n)
            [salt] = salted.findall(seen.body)
            salts.add(salt)
            kept = salted.sub(b'"cache_salt" :  "mine"', seen.body) if own else seen.body
            bare = salted.sub(b"", seen.body).replace(b"{,", b"{", 1)
            assert (kept if own else bare).split() == body.split()
    assert len(salts - {b"mine"}) == 4
