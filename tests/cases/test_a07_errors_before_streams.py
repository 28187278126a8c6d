"""A07: what fails before the first byte of a stream is a proper status, never a 200."""

from __future__ import annotations

import gzip
import json

import openai
import pytest
from caserig import COMPLETIONS, body_for, check_error, inflight, sdk
from rig import (
    CHAT,
    CLOSE,
    CUT,
    DONE,
    ROLE,
    SSE_HEAD,
    answer,
    ask,
    chat,
    chunk,
    completion,
    cut_stream,
    delta,
    event,
    head,
    plain,
    raw_stream,
    stream,
)

JSON_TYPE = ("Content-Type", "application/json")
REFUSAL = {"error": {"message": "too long", "type": "invalid_request_error", "code": "x"}}
CHUNKED_JSON = head(400, JSON_TYPE, ("Transfer-Encoding", "chunked"))
PACKED = gzip.compress(json.dumps(REFUSAL).encode())

STATUSES = {
    "400 json": (answer(REFUSAL, 400), 400, "too long"),
    "401 json": (answer(REFUSAL, 401), 401, "too long"),
    "404 json": (answer(REFUSAL, 404), 404, "too long"),
    "409 json": (answer(REFUSAL, 409), 409, "too long"),
    "422 fastapi": (answer({"detail": [{"msg": "bad"}]}, 422), 422, "bad"),
    "429 text": (plain(b"slow down", 429, ("Retry-After", "3")), 429, "slow down"),
    "400 old vllm": (answer({"object": "error", "message": "too long"}, 400), 400, "too long"),
    "400 chunked": (
        [
            CHUNKED_JSON,
            chunk(json.dumps(REFUSAL).encode()[:9]),
            0.01,
            chunk(json.dumps(REFUSAL).encode()[9:]) + chunk(b""),
        ],
        400,
        "too long",
    ),
    "400 of a stream": (
        plain(event(REFUSAL), 400, ("Content-Type", "text/event-stream")),
        400,
        "too long",
    ),
    "400 empty": (plain(b"", 400), 400, "400"),
    "400 gzip": (plain(PACKED, 400, JSON_TYPE, ("Content-Encoding", "gzip")), 400, ""),
    "503 text": (plain(b"overloaded", 503, ("Content-Type", "text/plain")), 503, "overloaded"),
    "500 html": (plain(b"<html>x</html>", 500, ("Content-Type", "text/html")), 500, ""),
    "500 empty": (plain(b"", 500), 500, ""),
    "502 json list": (answer([1], 502), 502, ""),
    "504 text": (plain(b"late", 504), 504, "late"),
    "200 json error": (answer({"error": {"message": "no", "code": 500}}), 500, "no"),
    "200 json error 400": (answer({"error": {"message": "no", "code": 400}}), 400, "no"),
    "200 error event": (raw_stream(event({"error": {"message": "no"}})), 502, "no"),
    "200 role, error event": (
        raw_stream(ROLE, event({"error": {"message": "no", "code": 400}})),
        400,
        "no",
    ),
    "200 error of kind object": (
        raw_stream(event({"object": "error", "message": "no", "code": 400})),
        400,
        "no",
    ),
    "200 ping, error event": (
        raw_stream(b": ping\n\n", b"event: error\n" + event({"error": {"message": "no"}})),
        502,
        "no",
    ),
    "200 empty stream": (raw_stream(), 502, ""),
    "200 only comments": (raw_stream(b": ping\n\n", b": ping\n\n"), 502, ""),
    "200 role, then cut": (cut_stream(ROLE, how=CUT), 502, ""),
    "200 role, then closed": (cut_stream(ROLE, how=CLOSE), 502, ""),
    "redirect": (plain(b"", 307, ("Location", "http://127.0.0.1:1/")), 502, ""),
    "cut head": ([b"HTTP/1.1 200 OK\r\nConte", 0.01, CUT], 502, ""),
    "no answer": ([0.01, CUT], 502, ""),
}


def check(reply, status: int, message: str) -> None:
    """A JSON error of exactly that status, framed by its true length."""
    error = check_error(reply, status)
    assert message in error["message"]
    assert reply.header("content-length") == str(len(reply.body))
    assert reply.header("transfer-encoding") is None
    assert reply.header("content-encoding") is None


NO_EVENTS = [how for how in STATUSES if not how.startswith("200") or "json" in how]
"""What a request for a whole answer can get as well."""


@pytest.mark.parametrize(
    ("how", "streamed"), [*((how, True) for how in STATUSES), *((how, False) for how in NO_EVENTS)]
)
async def test_it_has_its_status(stub, serve, dial, how, streamed) -> None:
    script, status, message = STATUSES[how]
    worker = await stub()
    served = await serve(worker)
    worker.plays(script)
    client = await dial(served.url)
    reply = await client.ask("POST", CHAT, json.dumps(chat(stream=streamed)).encode())
    check(reply, status, message)
    if "Retry-After" in str(script):
        assert reply.header("retry-after") == "3"
    assert (await inflight(served.admin))[worker.id] == 0
    # Nothing of the failed answer is left on the connection.
    worker.plays(stream(delta("fine")))
    again = await client.ask("POST", CHAT, json.dumps(chat(stream=True)).encode())
    assert (again.status, again.text, again.events[-1]) == (200, "fine", "[DONE]")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_in_the_order_of_the_case(stub, serve, path) -> None:
    worker = await stub()
    served = await serve(worker)
    body = body_for(path, stream=True)
    worker.plays(answer(REFUSAL, 400))
    check(await ask(served.url, path, body), 400, "too long")
    worker.plays(plain(b"overloaded", 503, ("Content-Type", "text/plain")))
    reply = await ask(served.url, path, body)
    assert 500 <= reply.status < 600
    check(reply, reply.status, "")
    worker.plays(completion("whole"))
    reply = await ask(served.url, path, body)
    assert (reply.status, reply.header("content-type")) == (200, "application/json")
    assert reply.json["choices"][0]["message"]["content"] == "whole"


@pytest.mark.parametrize("how", ["400 json", "422 fastapi", "503 text", "200 error event"])
async def test_the_sdk_raises_before_it_reads(stub, serve, how) -> None:
    script, status, _ = STATUSES[how]
    worker = await stub()
    served = await serve(worker)
    worker.plays(script)
    async with sdk(served.url) as client:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.chat.completions.create(**chat(stream=True))
    assert raised.value.status_code == status


async def test_our_own_refusals_have_their_status_too(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    for body, status in (
        ({**chat(stream=True), "model": "nobody"}, 404),
        ({"model": "m", "messages": [], "stream": True}, 400),
        (chat(stream="yes"), 400),
        (chat(stream=True, stream_options="all"), 400),
    ):
        check_error(await ask(served.url, CHAT, body), status)
    assert worker.seen == []


@pytest.mark.parametrize("how", ["503 text", "200 error event", "200 role, then cut", "no answer"])
async def test_another_worker_makes_it_good(stub, serve, how) -> None:
    one, two = await stub(), await stub()
    served = await serve(one, two, **{"routing.policy": "round_robin"})
    for bad, good in ((one, two), (two, one)):
        bad.plays(STATUSES[how][0])
        good.plays(stream(delta("good")))
        for _ in range(2):
            reply = await ask(served.url, CHAT, chat(stream=True))
            assert (reply.status, reply.text) == (200, "good")


async def test_a_head_is_not_sent_before_there_is_something_to_say(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)
    refused = event({"error": {"message": "refused", "code": 400}})
    worker.plays([SSE_HEAD, chunk(ROLE), 0.3, chunk(refused), chunk(b"")])
    client = await dial(served.url)
    reply = await client.ask("POST", CHAT, json.dumps(chat(stream=True)).encode())
    check(reply, 400, "refused")
    worker.plays(raw_stream(ROLE, delta(finish="stop"), DONE))
    reply = await client.ask("POST", CHAT, json.dumps(chat(stream=True)).encode())
    assert (reply.status, reply.text, reply.events[-1]) == (200, "", "[DONE]")
