"""Answers that workers should not give: none of them reaches a client as a success it is not,
spoils what the gateway counts, or makes a ledger that cannot be reported on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from rig import (
    CHAT,
    CLOSE,
    DONE,
    SSE_HEAD,
    STOP,
    answer,
    ask,
    chat,
    chunk,
    completion,
    delta,
    event,
    head,
    plain,
    raw_stream,
    stream,
    usage,
)

from gateway.report import summarise

JSON = ("Content-Type", "application/json")
NO_ANSWERS = {
    "html": plain(b"<html>hi</html>", 200, ("Content-Type", "text/html")),
    "html as JSON": plain(b"<html>", 200, JSON),
    "half of it": plain(b'{"id":', 200, JSON),
    "nothing": plain(b"", 200, JSON),
    "a list": plain(b"[]", 200, JSON),
    "null": plain(b"null", 200, JSON),
    "204": [head(204)],
    "205": [head(205, ("Content-Length", "0"))],
    "an event stream": stream(delta("a")),
    "301": [head(301, ("Location", "http://127.0.0.1:1/"), ("Content-Length", "0"))],
    "304": [head(304)],
    "101": [head(101, ("Upgrade", "x"), ("Connection", "Upgrade")), b"garbage"],
    "600": plain(b"x", 600),
    "999": plain(b'{"error":{"message":"x"}}', 999, JSON),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_what_is_no_answer_is_replaced_or_502(stub, serve, name, path) -> None:
    odd, good = await stub(), await stub()
    served = await serve(odd)
    odd.plays(NO_ANSWERS[name])
    body = {**chat(), "prompt": "hi"}
    reply = await asyncio.wait_for(ask(served.url, path, body), 30)
    assert reply.status == 502
    assert reply.json["error"]["message"]

    served = await serve(odd, good)
    for _ in range(4):
        assert (await asyncio.wait_for(ask(served.url, path, body), 30)).status == 200
    assert served.inflight() == 0


async def test_a_packed_answer_passes_unread(stub, serve) -> None:
    worker = await stub()
    worker.plays(plain(b"\x1f\x8bxyz", 200, JSON, ("Content-Encoding", "gzip")))
    reply = await ask((await serve(worker)).url, CHAT, chat())
    assert (reply.status, reply.body) == (200, b"\x1f\x8bxyz")


def lax(content: str) -> bytes:
    """A chunk whose content is written as given, escapes and all."""
    return b'data: {"choices":[{"index":0,"delta":{"content":%s}}]}\n\n' % content.encode()


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (['"\\ud83c"', '"\\udf0d"'], "\ud83c\udf0d"),
        (['"a","x":NaN', '"b","y":-Infinity', '"c","z":1e999'], "abc"),
        (['"\\udfff"'], "\udfff"),
    ],
)
@pytest.mark.parametrize("wanted", [True, False])
async def test_text_in_lax_json_is_never_dropped(stub, serve, pieces, text, wanted) -> None:
    worker = await stub()
    with_usage = [
        piece.replace(b'{"choices"', b'{"usage":' + json.dumps(usage()).encode() + b',"choices"')
        for piece in map(lax, pieces)
    ]
    options = {"stream_options": {"include_usage": True}} if wanted else {}
    for played in (list(map(lax, pieces)), with_usage):
        worker.plays(raw_stream(*played, STOP, DONE))
        served = await serve(worker)
        reply = await ask(served.url, CHAT, chat(stream=True, **options))
        assert (reply.status, reply.complete) == (200, True)
        assert reply.text == text
        assert reply.events[-1] == "[DONE]"
    used = [json.loads(e).get("usage") for e in reply.events[:-1]]
    assert [bool(u) for u in used] == [*(False for _ in range(len(used) - 1)), wanted]


async def test_lax_json_in_whole_answers_and_errors(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker, **{"routing.retries": 0})
    body = b'{"choices":[{"message":{"content":"\\ud83c"},"logprobs":NaN}]}'
    worker.plays(plain(body, 200, JSON))
    reply = await ask(served.url, CHAT, chat())
    assert (reply.status, reply.body) == (200, body)
    error = b'data: {"error":{"message":"\\ud83c","code":NaN}}\n\n'
    for script, status in (
        (plain(b'{"error":{"message":"\\ud83c","x":NaN}}', 400, JSON), 400),
        (plain(b'{"detail":{"a":"\\ud83c"}}', 400, JSON), 400),
        (raw_stream(error), 502),
        (raw_stream(delta("a"), error), 200),
    ):
        worker.plays(script)
        reply = await ask(served.url, CHAT, chat(stream=True))
        assert (reply.status, reply.complete) == (status, True)
        assert b"\\ud83c" in reply.body


async def test_a_stream_without_a_type_is_given_its_own(stub, serve) -> None:
    worker = await stub()
    bare = head(200, ("Transfer-Encoding", "chunked"))
    script = [bare if part is SSE_HEAD else part for part in stream(delta("a"))]
    worker.plays(script)
    reply = await ask((await serve(worker)).url, CHAT, chat(stream=True))
    assert reply.header("content-type") == "text/event-stream"
    assert reply.text == "a"


NUMBERS = [-1, 0, 1, 2.5, True, None, "7", [], 2**31, 2**63 - 1, 2**63, 10**30, 10**400]


def counted(prompt: object, completion_: object, cached: object) -> dict:
    """A usage object of anything."""
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion_}
    return {**counts, "prompt_tokens_details": details}


async def test_no_usage_spoils_the_ledger(stub, serve, tmp_path: Path) -> None:
    worker = await stub()
    served = await serve(worker, **{"ledger.dir": str(tmp_path)})
    asked = 0
    for number in NUMBERS:
        for counts in ((number, 1, 0), (7, number, 0), (7, 1, number), (number, number, number)):
            for streamed in (False, True):
                told = counted(*counts)
                last = event({"choices": [], "usage": told})
                worker.plays(
                    raw_stream(delta("a"), STOP, last, DONE) if streamed else completion(usage=told)
                )
                reply = await ask(served.url, CHAT, chat(stream=streamed))
                assert (reply.status, reply.complete) == (200, True), counts
                asked += 1
    await served.gateway.close()
    assert summarise([tmp_path]).totals["requests"] == asked


async def test_the_connection_after_an_odd_answer_is_clean(stub, serve) -> None:
    """What a worker sends beyond its answer is never taken for the next one."""
    worker = await stub()
    more = completion("stray")[0]
    worker.plays([completion("first")[0] + more], completion("second"), completion("third"))
    served = await serve(worker)
    texts = []
    for _ in range(3):
        reply = await ask(served.url, CHAT, chat())
        texts.append(reply.json["choices"][0]["message"]["content"])
    assert texts == ["first", "second", "third"]


async def test_error_types_follow_the_status(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker, **{"routing.retries": 0})
    for status, kind in ((400, "invalid_request_error"), (429, "invalid_request_error"),
                         (503, "server_error")):  # fmt: skip
        worker.plays(answer({"error": {"message": "x"}}, status))
        reply = await ask(served.url, CHAT, chat())
        assert (reply.status, reply.json["error"]["type"]) == (status, kind)


async def test_a_close_instead_of_an_end_is_no_end(stub, serve) -> None:
    worker = await stub()
    worker.plays([SSE_HEAD, chunk(delta("a")), 0.02, CLOSE])
    reply = await ask((await serve(worker)).url, CHAT, chat(stream=True))
    assert "error" in reply.events[-1]
