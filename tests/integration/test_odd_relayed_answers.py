"""Whole answers that are none, on the routes that are passed on: the same as in a chat.

What such a route's clients can read is JSON (or a stream, where they asked for one, or bytes, which
engines give embeddings as). Anything else with status 200 is tried elsewhere, or becomes a 502.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from integration.test_break_answers import JSON, NO_ANSWERS
from rig import CHAT, Script, ask, chunk, event, head, plain, raw_stream

OBJECTS = ("/v1/embeddings", "/v1/responses", "/v1/messages")
LISTS_TOO = ("/v1/rerank", "/v1/score", "/tokenize", "/detokenize")
DIALOGUES = ("/v1/responses", "/v1/messages")
BODY = {"model": "m", "input": "x", "messages": [], "max_tokens": 9}
GOOD = b'{"id": "a", "data": [1e999, "\\ud83c", NaN], "error": null}'
FAILED = {
    "an error": plain(b'{"error":{"message":"boom","type":"server_error"}}', 200, JSON),
    "an error of a text": plain(b'{"error":"boom"}', 200, JSON),
    "text": plain(b"Internal Server Error", 200, ("Content-Type", "text/plain")),
    "untyped text": plain(b"oops", 200),
    "untyped nothing": plain(b"", 200),
    "bytes as JSON": plain(b'{"data":"\xff"}', 200, JSON),
    "other JSON": plain(b"{", 200, ("Content-Type", "application/problem+json; charset=utf-8")),
}
TURNS = {"routing.policy": "round_robin"}
ODD = {**NO_ANSWERS, **FAILED}


@pytest.mark.parametrize("path", [*OBJECTS, *LISTS_TOO])
async def test_what_is_no_answer_is_replaced_or_502(stub, serve, path: str) -> None:
    odd, good = await stub(), await stub()
    good.plays(plain(GOOD, 200, JSON))
    alone, both = await serve(odd), await serve(odd, good, **TURNS)
    played = {name: ODD[name] for name in ODD if name != "a list" or path in OBJECTS}
    asked = len(played)
    for name, script in played.items():
        odd.plays(script)
        reply = await asyncio.wait_for(ask(alone.url, path, BODY), 10)
        assert reply.status == 502, name
        assert reply.json["error"]["message"]
        reply = await asyncio.wait_for(ask(both.url, path, BODY), 10)
        assert (reply.status, reply.body) == (200, GOOD), name
    assert len(odd.seen) > asked, "some of them were asked elsewhere"
    assert alone.inflight() == both.inflight() == 0


@pytest.mark.parametrize("path", [CHAT, *DIALOGUES])
async def test_what_is_no_stream_is_replaced_or_502(stub, serve, path: str) -> None:
    odd, good = await stub(), await stub()
    whole = b"".join(STREAMS[path])
    good.plays(raw_stream(whole))
    alone, both = await serve(odd), await serve(odd, good, **TURNS)
    body = {**BODY, "messages": [{"role": "user", "content": "x"}], "stream": True}
    kinds = ("text/html", "text/plain", "application/octet-stream", "")
    asked = len(kinds)
    for kind in kinds:
        odd.plays(plain(b"<html>hi</html>", 200, *([("Content-Type", kind)] if kind else [])))
        reply = await asyncio.wait_for(ask(alone.url, path, body), 10)
        assert reply.status == 502, kind
        reply = await asyncio.wait_for(ask(both.url, path, body), 10)
        assert (reply.status, reply.body) == (200, whole), kind
    assert len(odd.seen) > asked, "some of them were asked elsewhere"


def named(kind: str, **more: Any) -> bytes:
    """An event with its name."""
    return f"event: {kind}\n".encode() + event({"type": kind, **more})


STREAMS = {
    CHAT: [
        event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}),
        b"data: [DONE]\n\n",
    ],
    "/v1/responses": [
        named("response.output_text.delta", delta="a"),
        named("response.completed", response={"id": "r"}),
    ],
    "/v1/messages": [named("content_block_delta", delta={"text": "a"}), named("message_stop")],
}


@pytest.mark.parametrize("path", DIALOGUES)
@pytest.mark.parametrize("asked", [True, 1, "true"])
async def test_a_stream_without_a_type_is_given_its_own(
    stub, serve, path: str, asked: object
) -> None:
    """Engines that are lax about what is true stream for these too."""
    worker = await stub()
    whole = b"".join(STREAMS[path])
    worker.plays([head(200, ("Transfer-Encoding", "chunked")), chunk(whole), b"0\r\n\r\n"])
    reply = await ask((await serve(worker)).url, path, {**BODY, "stream": asked})
    assert (reply.status, reply.body) == (200, whole)
    assert reply.header("content-type") == "text/event-stream"


PASSED: dict[str, Script] = {
    "undeclared": plain(GOOD, 200),
    "as text": plain(GOOD, 200, ("Content-Type", "text/plain")),
    "with parameters": plain(GOOD, 200, ("Content-Type", "Application/JSON; charset=utf-8")),
    "another JSON": plain(GOOD, 200, ("Content-Type", "application/vnd.x+json")),
    "packed": plain(gzip.compress(GOOD), 200, JSON, ("Content-Encoding", "gzip")),
    "as bytes": plain(b"\x00\xff", 200, ("Content-Type", "application/octet-stream")),
}


@pytest.mark.parametrize("name", PASSED)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
async def test_what_is_an_answer_passes_as_it_is(stub, serve, path: str, name: str) -> None:
    worker = await stub()
    worker.plays(PASSED[name])
    reply = await ask((await serve(worker)).url, path, BODY)
    assert reply.status == 200
    assert b"".join(part for part in PASSED[name] if isinstance(part, bytes)).endswith(reply.body)
    assert reply.body


@pytest.mark.parametrize("path", LISTS_TOO)
async def test_lists_are_answers_too(stub, serve, path: str) -> None:
    worker = await stub()
    listed = json.dumps([{"index": 0, "score": 0.5}]).encode()
    worker.plays(plain(listed, 200, JSON))
    assert (await ask((await serve(worker)).url, path, BODY)).body == listed


async def test_an_error_with_a_status_of_its_own_is_final(stub, serve) -> None:
    workers = [await stub(), await stub()]
    for each in workers:
        each.plays(plain(b'{"error":{"message":"too long","code":400}}', 200, JSON))
    reply = await ask((await serve(*workers)).url, "/v1/embeddings", BODY)
    assert (reply.status, reply.json["error"]["message"]) == (400, "too long")
    assert sum(len(each.seen) for each in workers) == 1


@pytest.mark.parametrize("kind", ["text/html", "audio/mpeg", ""])
async def test_of_other_routes_nothing_is_known(stub, serve, kind: str) -> None:
    worker = await stub()
    worker.plays(plain(b"<html>", 200, *([("Content-Type", kind)] if kind else [])))
    reply = await ask((await serve(worker)).url, "/v1/audio/speech", BODY)
    assert (reply.status, reply.body) == (200, b"<html>")
