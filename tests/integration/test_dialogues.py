"""Responses and Messages go to where their conversation is.

What counts of a prompt and what does not, what is known of it to whom, what answers say about it,
and what the ledger has of it. Besides: ``test_dialogue_bodies.py`` (bodies and answers pass as they
are), ``test_stored_responses.py`` (``previous_response_id``).
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from dialoguekit import (
    ANSWER,
    CACHED,
    FORMS,
    KEYS,
    MESSAGES,
    RESPONSES,
    SYSTEM,
    TURNS,
    Counts,
    Speaker,
    base,
    bearer,
    either_route,
    either_way,
    events_of,
    item_of,
    matched,
    place,
    rendered,
    request,
    say,
    told,
    usage_of,
    whole,
    with_tools,
    words,
)
from rig import END, answer, chunk, head

from gateway.report import read_ledger

# --- conversations -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@either_way
@either_route
async def test_a_conversation_stays_where_it_began(
    stub, serve, route: str, stream: bool, form: str
) -> None:
    rng = random.Random(1)
    # What is not cached takes long beside the noise of a busy machine, which is measured too.
    speakers = [Speaker(await stub(), prefill_s=1.5e-4) for _ in range(4)]
    served = await serve(*(each.stub for each in speakers))
    talks: list[Any] = [(words(rng, 400), [], []) for _ in range(5)]
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
    longer = [*TURNS[:2], ("user", "x" + TURNS[2][1])]
    return {
        "tools": (base(route, tools=[{**with_tools(route)[0], "name": "g"}]), "", "tools"),
        "no tools": (base(route, tools=[]), "", "tools"),
        "system": (request(route, TURNS, "x" + SYSTEM, tools=with_tools(route)), "tools", "system"),
        "no system": (request(route, TURNS, tools=with_tools(route)), "tools", "system"),
        "a picture": ({**base(route), **_turns(route, shown)}, "system", "first"),
        "a role": ({**base(route), **_turns(route, renamed)}, "system", "first"),
        "the last turn": ({**base(route), **_turns(route, longer)}, "first", "last"),
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


@pytest.mark.parametrize("code", [500, None])
@either_route
async def test_an_error_with_status_200_is_one(stub, serve, route: str, code: int | None) -> None:
    """And is asked elsewhere; a response that failed is an answer with an id."""
    bad, good = await stub(), await stub()
    served = await serve(bad, good)
    error = {"message": "boom", "type": "server_error", "code": code}
    Speaker(good)
    bad.plays(answer({"type": "error", "error": error}))
    rng = random.Random(2)
    for _ in range(20):  # what nobody holds goes to either
        body = request(route, [("user", words(rng, 30))])
        assert place(await say(served.url, route, body)) == good.id
    assert bad.seen
    told = {"id": "x", "object": "response", "status": "failed", "error": error}
    for each in (bad, good):
        each.respond = None
        each.plays(answer(told))
    for _ in range(2):
        assert (await say(served.url, route, base(route))).json == told


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
    first = [matched(await say(served.url, route, body)) for body in prompts[:3]]
    assert first[0] > 100, "nothing was said yet"
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
