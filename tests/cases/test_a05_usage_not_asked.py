"""A05: usage that the client did not ask for stays with the gateway, which counts it itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for, piece, sdk, total
from rig import (
    CHAT,
    DONE,
    ROLE,
    ask,
    chat,
    completion,
    event,
    eventually,
    raw_stream,
    usage,
    usage_event,
)

ENVELOPE = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
NOT_ASKED: dict[str, dict[str, Any]] = {
    "left out": {},
    "null": {"stream_options": None},
    "false": {"stream_options": {"include_usage": False}},
    "empty": {"stream_options": {}},
    "null inside": {"stream_options": {"include_usage": None}},
    "another option": {"stream_options": {"x_option": {"include_usage": True}}},
    "the name elsewhere": {"metadata": {"stream_options": {"include_usage": True}}},
}


def worker_streams(path: str) -> dict[str, list[bytes]]:
    """How workers report usage: at the end, on each chunk, on the last one, or null before it."""
    texts = [piece(path, "a"), piece(path, "b"), piece(path, finish="stop")]
    last = {**ENVELOPE, "choices": [], "usage": usage()}
    return {
        "own chunk": [*map(event, texts), event(last)],
        "every chunk": [*(event({**t, "usage": usage()}) for t in texts), event(last)],
        "finish chunk": [*map(event, texts[:2]), event({**texts[2], "usage": usage()})],
        "null before": [*(event({**t, "usage": None}) for t in texts), event(last)],
        "no choices member": [*map(event, texts), event({**ENVELOPE, "usage": usage()})],
        "null choices": [*map(event, texts), event({**last, "choices": None})],
    }


async def counted(admin: str) -> tuple[float, float]:
    """Cached and computed prompt tokens of the model so far."""
    name = "headwater_prompt_tokens_total"
    return (
        await total(admin, name, model="m", source="cached"),
        await total(admin, name, model="m", source="computed"),
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("how", worker_streams(CHAT))
async def test_no_usage_and_no_empty_choices(stub, serve, path, how) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(raw_stream(*worker_streams(path)[how], DONE))
    for turn, options in enumerate(NOT_ASKED.values(), 1):
        reply = await ask(served.url, path, body_for(path, stream=True, **options))
        assert (reply.status, reply.complete) == (200, True)
        *chunks, done = reply.events
        assert done == "[DONE]"
        decoded = [json.loads(each) for each in chunks]
        assert [len(each["choices"]) for each in decoded] == [1, 1, 1]
        assert all(each.get("usage") is None for each in decoded)
        assert await counted(served.admin) == (4.0 * turn, 3.0 * turn)


@pytest.mark.parametrize("how", worker_streams(CHAT))
async def test_a_client_that_reads_the_first_choice_never_fails(stub, serve, how) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(raw_stream(*worker_streams(CHAT)[how], DONE))
    async with sdk(served.url) as client:
        texts = []
        async for part in await client.chat.completions.create(**chat(stream=True)):
            texts.append(part.choices[0].delta.content or "")
            assert part.usage is None
    assert "".join(texts) == "ab"


@pytest.mark.parametrize("options", NOT_ASKED.values(), ids=NOT_ASKED)
async def test_the_worker_is_asked_and_nothing_else_changes(stub, serve, options) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(raw_stream(ROLE, event(piece(CHAT, finish="stop")), DONE))
    sent = chat("ü \u2028", stream=True, big=2**70, deep={"a": [1, {"b": None}]}, **options)
    await ask(served.url, CHAT, sent)
    got = worker.seen[0].json
    assert got["stream_options"]["include_usage"] is True
    kept = dict(sent.get("stream_options") or {})
    kept.pop("include_usage", None)
    assert {k: v for k, v in got["stream_options"].items() if k != "include_usage"} == kept
    assert {k: v for k, v in got.items() if k != "stream_options"} == {
        k: v for k, v in sent.items() if k != "stream_options"
    }
    assert str(2**70).encode() in worker.seen[0].body


async def test_several_choices(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    events = []
    for index in (0, 1, 0, 1):
        choice = {"index": index, "delta": {"content": "x"}, "finish_reason": None}
        events.append(event({**ENVELOPE, "choices": [choice], "usage": usage()}))
    for index in (1, 0):
        choice = {"index": index, "delta": {}, "finish_reason": "stop"}
        events.append(event({**ENVELOPE, "choices": [choice], "usage": usage()}))
    worker.plays(raw_stream(*events, usage_event(), DONE))
    reply = await ask(served.url, CHAT, chat(stream=True, n=2))
    decoded = [json.loads(each) for each in reply.events[:-1]]
    assert len(decoded) == 6
    assert all(len(each["choices"]) == 1 and not each.get("usage") for each in decoded)


async def test_whole_answers_keep_their_usage(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(completion("x"))
    for options in ({}, {"stream": False}, {"stream": None}):
        reply = await ask(served.url, CHAT, chat(**options))
        assert reply.json["usage"] == usage()
    assert "stream_options" not in worker.seen[-1].json


async def test_our_own_worker(fake_worker, serve) -> None:
    served = await serve(**{"workers.urls": fake_worker.url})
    await eventually(lambda: served.gateway.router.ready()[0], 10.0)
    for options in NOT_ASKED.values():
        body = chat("hi", stream=True, max_tokens=5, ignore_eos=True, **options)
        reply = await ask(served.url, CHAT, {**body, "model": "fake"})
        decoded = [json.loads(each) for each in reply.events[:-1]]
        assert reply.events[-1] == "[DONE]"
        assert len(decoded) >= 2
        assert all(each["choices"] and not each.get("usage") for each in decoded)
    computed = await total(
        served.admin, "headwater_prompt_tokens_total", model="fake", source="computed"
    )
    assert computed > 0
