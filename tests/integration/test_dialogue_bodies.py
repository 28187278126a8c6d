"""Bodies and answers of Responses and Messages pass byte for byte, however odd they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from caserig import check_error, counts
from dialoguekit import (
    KEYS,
    TURNS,
    Counts,
    Speaker,
    base,
    bearer,
    either_route,
    either_way,
    events_of,
    request,
    say,
    script,
    told,
    usage_of,
    whole,
)
from rig import answer, ask

from gateway.engines import plain
from gateway.engines.base import Salting
from gateway.report import read_ledger, summarise

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
    b'{"model":"m","input":' + b"[" * DEEP + b"]" * DEEP + b"}",
    b'{"model":"m","messages":' + b'[{"content":' * DEEP + b"1" + b"}]" * DEEP + b"}",
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
async def test_what_is_no_object_is_refused_before_a_worker_is_asked(
    stub, serve, route: str
) -> None:
    worker = await stub()
    served = await serve(worker)
    for body in NO_OBJECT:
        reply = await ask(served.url, route, body)
        check_error(reply, 400)
        assert reply.json["error"]["message"].startswith("The body "), body[:300]
    assert worker.seen == []


@either_route
async def test_any_object_reaches_a_worker_byte_for_byte(stub, serve, route: str) -> None:
    worker = await stub()
    worker.plays(told(route, False, "r", usage_of(route, Counts(9, 0))))
    served = await serve(worker)
    bodies = [*RAW]
    bodies += [json.dumps({**base(route), f: value}).encode() for f in FIELDS for value in ODD]
    for body in bodies:
        reply = await ask(served.url, route, body)
        assert reply.status == 200, (body[:300], reply.body)
        assert worker.seen[-1].body == body, body[:300]
    assert len(worker.seen) == len(bodies)
    worker.plays(answer({"error": {"message": "too odd", "type": "its_own"}}, 400))
    reply = await ask(served.url, route, bodies[0])
    assert (reply.status, reply.json["error"]["message"]) == (400, "too odd")


@either_route
async def test_without_any_model_it_is_refused(stub, serve, route: str) -> None:
    worker = await stub(("m", "n"))
    served = await serve(worker)
    body = {name: value for name, value in base(route).items() if name != "model"}
    bodies = [*NO_OBJECT, json.dumps(body).encode()]
    names = ["", *(value for value in ODD if not isinstance(value, str))]
    bodies += [json.dumps({**body, "model": each}).encode() for each in names]
    for raw in bodies:
        check_error(await ask(served.url, route, raw), 400)
    assert worker.seen == []


@either_way
@either_route
async def test_tenants_bodies_are_changed_in_their_salt_only(
    stub, serve, monkeypatch, route: str, stream: bool
) -> None:
    monkeypatch.setattr(plain.PlainEngine, "salting", Salting.ROOT)
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
