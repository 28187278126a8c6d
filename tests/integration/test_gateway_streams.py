"""Relayed streams: bytes, errors, usage, odd but legal events (cases A01, A05, A06, A07, A18)."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from rig import (
    CHAT,
    CLOSE,
    CUT,
    DONE,
    END,
    HANG,
    ROLE,
    SSE_HEAD,
    STOP,
    answer,
    ask,
    chat,
    chunk,
    completion,
    cut_stream,
    delta,
    event,
    plain,
    raw_stream,
    stream,
    usage,
    usage_event,
)

TEXT = "你好🌍é"


async def test_a_character_cut_anywhere_arrives_whole(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    data = delta(TEXT)
    end = [chunk(STOP), chunk(DONE), END]
    bytewise = [SSE_HEAD, *(chunk(data[i : i + 1]) for i in range(len(data))), *end]
    cuts = [
        [SSE_HEAD, chunk(data[:at]), 0.001, chunk(data[at:]), *end] for at in range(1, len(data))
    ]
    for script in (bytewise, *cuts):
        worker.plays(script)
        reply = await ask(served.url, CHAT, chat(stream=True))
        assert reply.complete
        assert reply.text == TEXT
        assert reply.body == data + STOP + DONE


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}]
)
@pytest.mark.parametrize("everywhere", [False, True])
async def test_usage_is_hidden_from_who_did_not_ask(stub, serve, options, everywhere) -> None:
    worker = await stub()
    served = await serve(worker)
    one = event({"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": usage()})
    events = [one, STOP] if everywhere else [delta("a"), STOP]
    worker.plays(raw_stream(ROLE, *events, usage_event(), DONE))
    reply = await ask(served.url, CHAT, chat(stream=True, **options))
    assert worker.seen[0].json["stream_options"]["include_usage"] is True
    chunks = [json.loads(e) for e in reply.events[:-1]]
    assert all(c["choices"] and not c.get("usage") for c in chunks)
    assert reply.text == "a"
    metrics = (await ask(served.admin, "/metrics")).body.decode()
    assert 'headwater_prompt_tokens_total{model="m",source="cached"} 4.0' in metrics
    assert 'headwater_prompt_tokens_total{model="m",source="computed"} 3.0' in metrics


@pytest.mark.parametrize("own_chunk", [False, True])
async def test_usage_that_was_asked_for_comes_once_and_last(stub, serve, own_chunk) -> None:
    worker = await stub()
    served = await serve(worker)
    one = event(
        {"id": "c-1", "choices": [{"index": 0, "delta": {"content": "a"}}], "usage": usage()}
    )
    last = [usage_event()] if own_chunk else []
    worker.plays(raw_stream(ROLE, one, STOP, *last, DONE))
    body = chat(stream=True, stream_options={"include_usage": True})
    reply = await ask(served.url, CHAT, body)
    assert worker.seen[0].body == json.dumps(body).encode()
    *chunks, done = reply.events
    assert done == "[DONE]"
    with_usage = [i for i, c in enumerate(chunks) if json.loads(c).get("usage")]
    assert with_usage == [len(chunks) - 1]
    assert json.loads(chunks[-1])["choices"] == []
    assert json.loads(chunks[-1])["usage"] == usage()


BROKEN = {
    "reset": cut_stream(ROLE, delta("a"), delta("b"), how=CUT),
    "closed": cut_stream(ROLE, delta("a"), delta("b"), how=CLOSE),
    "ended early": raw_stream(ROLE, delta("a"), delta("b")),
    "told": raw_stream(
        ROLE, delta("a"), delta("b"), event({"error": {"message": "boom", "type": "server_error"}})
    ),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_an_error_inside_a_stream_is_told(stub, serve, how) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(BROKEN[how])
    reply = await ask(served.url, CHAT, chat(stream=True))
    assert (reply.status, reply.complete) == (200, True)
    assert "[DONE]" not in reply.events
    *chunks, last = [json.loads(e) for e in reply.events]
    assert [c["choices"][0]["delta"] for c in chunks][1:] == [{"content": "a"}, {"content": "b"}]
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert set(last) == {"error"}
    assert last["error"]["message"] == "boom" if how == "told" else last["error"]["message"]
    assert len(worker.seen) == 1
    assert served.inflight() == 0


@pytest.mark.parametrize("how", BROKEN)
async def test_the_sdk_raises_on_a_broken_stream(stub, serve, how) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(BROKEN[how])
    texts = []

    async def read_all(client: openai.AsyncOpenAI) -> None:
        async for part in await client.chat.completions.create(**chat(stream=True)):
            texts.append(part.choices[0].delta.content)  # noqa: PERF401 - kept up to the error

    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="x", max_retries=0
    ) as client:
        with pytest.raises(openai.APIError):
            await read_all(client)
    assert texts[1:] == ["a", "b"]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        (answer({"error": {"message": "too long", "type": "x"}}, 400), 400, "too long"),
        (plain(b"overloaded", 503, ("Content-Type", "text/plain")), 503, "overloaded"),
        (plain(b"<html>", 502, ("Content-Type", "text/html")), 502, "502"),
        (answer({"error": {"message": "no", "code": 500}}), 500, "no"),
        (answer({"detail": "bad field"}, 422), 422, "bad field"),
    ],
)
async def test_an_error_before_the_stream_has_its_status(
    stub, serve, streamed, script, status, message
) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(script)
    reply = await ask(served.url, CHAT, chat(stream=streamed))
    assert reply.status == status
    assert reply.header("content-type") == "application/json"
    assert message in reply.json["error"]["message"]
    assert {"message", "type"} <= set(reply.json["error"])
    assert int(reply.header("content-length") or -1) == len(reply.body)


async def test_an_error_event_before_content_is_a_status(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(raw_stream(ROLE, event({"error": {"message": "bad n", "code": 400}})))
    reply = await ask(served.url, CHAT, chat(stream=True))
    assert reply.status == 400
    assert reply.json["error"]["message"] == "bad n"
    assert len(worker.seen) == 1


async def test_a_whole_answer_to_a_stream_request_passes(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(completion("whole"))
    reply = await ask(served.url, CHAT, chat(stream=True))
    assert reply.status == 200
    assert reply.header("content-type") == "application/json"
    assert reply.json["choices"][0]["message"]["content"] == "whole"


ODD = [
    b": ping\r\n\r\n",
    b"retry: 3000\n\n",
    b'event: message\ndata:{"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b": between\n\n",
    b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"b"}}]}\r\n\r\n',
    b"data:\n\n",
    b"data: {broken\n\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"c"},"finish_reason":"stop"}]}\r\n\r\n',
    b"data: [DONE]\r\n\r\n",
]


async def test_odd_but_legal_events(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(raw_stream(*ODD), raw_stream(b"".join(ODD)), raw_stream(*ODD))
    for _ in range(2):
        reply = await ask(served.url, CHAT, chat(stream=True))
        assert reply.text == "abc"
        assert reply.events[-1] == "[DONE]"
        assert all(reply.events)
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="x", max_retries=0
    ) as client:
        texts = [
            part.choices[0].delta.content
            async for part in await client.chat.completions.create(**chat(stream=True))
        ]
    assert "".join(texts) == "abc"


async def test_content_is_not_held_back(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)
    go_on = asyncio.Event()
    worker.plays([SSE_HEAD, chunk(ROLE + delta("a")), go_on, chunk(delta("b") + STOP + DONE), END])
    client = await dial(served.url)
    await client.send("POST", CHAT, json.dumps(chat(stream=True)).encode())
    await client.reader.readuntil(b"\r\n\r\n")
    pieces = client.chunks()
    async with asyncio.timeout(30):
        assert await anext(pieces) == ROLE + delta("a")
        go_on.set()
        assert await anext(pieces) == delta("b") + STOP + DONE
    client.close()


async def test_a_stream_without_end_mark_gets_one(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(raw_stream(ROLE, delta("a"), STOP))
    reply = await ask(served.url, CHAT, chat(stream=True))
    assert reply.body == ROLE + delta("a") + STOP + DONE


async def test_a_worker_that_lingers_after_the_end_delays_nobody(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays([*stream(delta("a"))[:-1], HANG])
    async with asyncio.timeout(30):
        reply = await ask(served.url, CHAT, chat(stream=True))
    assert reply.events[-1] == "[DONE]"
