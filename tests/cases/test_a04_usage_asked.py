"""A04: usage that a stream was asked for, from our worker and from stubs that report it oddly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for, piece, sdk
from cases.test_a05_usage_not_asked import worker_streams
from rig import CHAT, DONE, ask, event, raw_stream, usage

ASKED = {"stream": True, "stream_options": {"include_usage": True}}
SHAPES: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 1, "seed": 4},
    {"stop": ["e"], "ignore_eos": True, "max_tokens": 200},
    {"logprobs": 1, "max_tokens": 3},
    {"max_tokens": 1},
    {"logit_bias": {"257": 100}},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
]


def check(events: list[str]) -> dict[str, Any]:
    """One usage object, last before the end mark, and nowhere else; returns it."""
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    *chunks, last = (json.loads(data) for data in events[:-1])
    assert last["choices"] == []
    assert all(chunk["choices"] for chunk in chunks)
    assert all(chunk.get("usage") is None for chunk in chunks)
    found: dict[str, Any] = last["usage"]
    assert found["total_tokens"] == found["prompt_tokens"] + found["completion_tokens"]
    return found


@pytest.fixture(scope="module")
def gateway(module_gateway, fake_worker):
    """A gateway in front of the worker."""
    return module_gateway(fake_worker.url)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("where", ["worker", "gateway"])
async def test_our_worker(fake_worker, gateway, where, path) -> None:
    url = fake_worker.url if where == "worker" else gateway.url
    for shape in SHAPES:
        fields = {k: v for k, v in shape.items() if path == CHAT or k != "tools"}
        if path == CHAT and "logprobs" in fields:
            fields["logprobs"] = True
        body = {**body_for(path), "model": "fake", "temperature": 0, "max_tokens": 9, **fields}
        await ask(url, path, body)  # warm for both that follow
        whole = (await ask(url, path, body)).json
        streamed = check((await ask(url, path, {**body, **ASKED})).events)
        assert streamed == whole["usage"], shape
        if body.get("n", 1) == 1 and "stop" not in body and "logit_bias" not in body:
            said = whole["choices"][0]
            text = said["text"] if "text" in said else said["message"]["content"]
            ended = said["finish_reason"] == "stop"
            assert streamed["completion_tokens"] == len(text) + ended


@pytest.mark.parametrize("how", worker_streams(CHAT))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stubs(serve, stub, path, how) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(raw_stream(*worker_streams(path)[how], DONE))
    reply = await ask(served.url, path, {**body_for(path), **ASKED})
    assert check(reply.events) == usage()
    assert reply.text == ("ab" if path == CHAT else "")


async def test_a_running_count_that_stops_short(serve, stub) -> None:
    """Usage only beside content: what came last counts, in a chunk of its own."""
    worker = await stub()
    served = await serve(worker)
    counts = [usage(7, n) for n in (1, 2, 3)]
    pieces = [piece(CHAT, "a"), piece(CHAT, "b"), piece(CHAT, finish="stop")]
    events = [event({**each, "usage": n}) for each, n in zip(pieces, counts, strict=True)]
    worker.plays(raw_stream(*events, DONE))
    reply = await ask(served.url, CHAT, {**body_for(CHAT), **ASKED})
    assert check(reply.events) == usage(7, 3)


@pytest.mark.parametrize("where", ["worker", "gateway"])
async def test_the_real_client(fake_worker, gateway, where) -> None:
    async with sdk(fake_worker.url if where == "worker" else gateway.url) as client:
        body: Any = {"model": "fake", "messages": body_for(CHAT)["messages"], "temperature": 0}
        stream = await client.chat.completions.create(**body, **ASKED, max_tokens=6)
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(**body, max_tokens=6)
    assert [chunk for chunk in chunks if chunk.usage] == chunks[-1:]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
