"""A06: an error inside a running stream is told in the one form that clients understand."""

from __future__ import annotations

import json

import openai
import pytest
from caserig import COMPLETIONS, body_for, contents, inflight, piece, read_stream, total
from rig import (
    CHAT,
    CLOSE,
    CUT,
    END,
    HANG,
    ROLE,
    SSE_HEAD,
    ask,
    chat,
    chunk,
    cut_stream,
    delta,
    event,
    eventually,
    head,
    raw_stream,
    usage,
)

A, B = delta("a"), delta("b")
BOOM = {"message": "boom", "type": "server_error"}
UNFRAMED = head(200, ("Content-Type", "text/event-stream"), ("Connection", "close"))

BREAKS = {
    "reset": cut_stream(ROLE, A, B, how=CUT),
    "closed": cut_stream(ROLE, A, B, how=CLOSE),
    "ended cleanly": raw_stream(ROLE, A, B),
    "reset at once": [SSE_HEAD + chunk(ROLE) + chunk(A) + chunk(B), CUT],
    "closed at once": [SSE_HEAD + chunk(ROLE) + chunk(A) + chunk(B), CLOSE],
    "closed without framing": [UNFRAMED, ROLE + A + B, 0.01, CLOSE],
    "cut inside an event": cut_stream(ROLE, A, B, delta("c")[:40], how=CLOSE),
    "ended inside an event": raw_stream(ROLE, A, B, delta("c")[:-9]),
    "cut inside a character": cut_stream(ROLE, A, B, delta("é")[:-25], how=CUT),
    "no chunk size": [SSE_HEAD, chunk(ROLE + A + B), 0.01, b"\r\n", HANG],
    "not HTTP any more": [SSE_HEAD, chunk(ROLE + A + B), 0.01, b"zzz\r\n", 0.05, CLOSE],
}
TOLD = {
    "error event": event({"error": BOOM}),
    "with code": event({"error": {**BOOM, "code": 500, "param": None}}),
    "named event": b"event: error\n" + event({"error": BOOM}),
    "named event, bare object": b"event: error\n" + event(BOOM),
    "text only": event({"error": "boom"}),
    "beside choices": event({"choices": [], "error": BOOM}),
    "object of kind error": event({"object": "error", **BOOM, "param": None, "code": 500}),
    "then an end mark": event({"error": BOOM}) + b"data: [DONE]\n\n",
    "then more": event({"error": BOOM}) + delta("c"),
    "over two lines": b'data: {"error":{"message":"boom",\ndata: "type":"server_error"}}\n\n',
    "field of its own": b'error: {"message":"boom","type":"server_error"}\n\n',
    "bare JSON": b'{"error":{"message":"boom","type":"server_error"}}\n\n',
}
NOT_QUOTED = ("field of its own", "bare JSON")
"""Shapes that are no legal event: that it failed must be told, what was said need not be."""


def check(reply, message: str | None = None) -> None:
    """Two deltas, one error event, the end; nothing invented."""
    assert (reply.status, reply.complete) == (200, True)
    assert "text/event-stream" in reply.header("content-type")
    assert b"[DONE]" not in reply.body
    *chunks, last = [json.loads(each) for each in reply.events]
    assert contents(chunks) == ["a", "b"]
    assert all("error" not in each and each.get("object") != "error" for each in chunks)
    assert not any(c.get("finish_reason") for each in chunks for c in each["choices"])
    assert set(last) == {"error"}
    error = last["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert {"param", "code"} <= set(error)
    if message is not None:
        assert error["message"] == message
    # In the form of a plain data event: nothing else than "data:" lines.
    assert all(line.startswith(b"data:") for line in reply.body.split(b"\n") if line)


@pytest.mark.parametrize("how", BREAKS)
async def test_a_stream_that_breaks_off(stub, serve, how) -> None:
    worker, other = await stub(), await stub(("other",))
    served = await serve(worker, other)
    worker.plays(BREAKS[how])
    check(await ask(served.url, CHAT, chat(stream=True)))
    assert (len(worker.seen), len(other.seen)) == (1, 0)
    assert (await inflight(served.admin))[worker.id] == 0
    failed = await total(
        served.admin, "headwater_attempts_total", worker=worker.id, outcome="upstream_error"
    )
    assert failed == 1


@pytest.mark.parametrize("how", TOLD)
async def test_an_error_that_the_worker_tells(stub, serve, how) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(raw_stream(ROLE, A, B, TOLD[how]))
    reply = await ask(served.url, CHAT, chat(stream=True))
    check(reply, None if how in NOT_QUOTED else "boom")
    assert (await inflight(served.admin))[worker.id] == 0


@pytest.mark.parametrize("how", ["reset", "ended cleanly"])
async def test_text_completions_too(stub, serve, how) -> None:
    worker = await stub()
    served = await serve(worker)
    texts = [event(piece(COMPLETIONS, text)) for text in "ab"]
    worker.plays(cut_stream(*texts) if how == "reset" else raw_stream(*texts))
    check(await ask(served.url, COMPLETIONS, body_for(COMPLETIONS, stream=True)))


async def test_usage_that_was_asked_for_does_not_make_it_look_complete(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    one, two = ({**piece(CHAT, text), "usage": usage()} for text in "ab")
    worker.plays(cut_stream(event(one), event(two)))
    body = chat(stream=True, stream_options={"include_usage": True})
    check(await ask(served.url, CHAT, body))


async def test_one_of_two_choices_has_ended(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(
        cut_stream(A, delta("b", index=1), delta(finish="stop", index=1), how=CLOSE),
    )
    reply = await ask(served.url, CHAT, chat(stream=True, n=2))
    *chunks, last = [json.loads(each) for each in reply.events]
    assert set(last) == {"error"}
    ended = [c["index"] for each in chunks for c in each["choices"] if c["finish_reason"]]
    assert ended == [1]


async def test_silence_ends_in_an_error_too(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker, **{"workers.idle_timeout_s": 0.3})
    worker.plays([SSE_HEAD, chunk(ROLE + A + B), HANG])
    check(await ask(served.url, CHAT, chat(stream=True)))
    await eventually(lambda: worker.seen[0].closed_at is not None)


async def test_the_connection_lives_on_after_an_error(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)
    client = await dial(served.url)
    body = json.dumps(chat(stream=True)).encode()
    for script in (BREAKS["reset"], raw_stream(ROLE, A, B, TOLD["error event"])):
        worker.plays(script)
        check(await client.ask("POST", CHAT, body))
    worker.plays([SSE_HEAD, chunk(ROLE + A + delta(finish="stop") + b"data: [DONE]\n\n"), END])
    assert (await client.ask("POST", CHAT, body)).events[-1] == "[DONE]"


@pytest.mark.parametrize("how", [*BREAKS, *(each for each in TOLD)])
async def test_the_sdk_raises(stub, serve, how) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(BREAKS[how] if how in BREAKS else raw_stream(ROLE, A, B, TOLD[how]))
    texts: list[str] = []
    with pytest.raises(openai.APIError) as raised:
        await read_stream(served.url, chat(stream=True), texts)
    assert [text for text in texts if text] == ["a", "b"]
    if how in TOLD and how not in NOT_QUOTED:
        assert "boom" in str(raised.value)
