"""A11: the output limit by both of its names, and the end that it leads to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for
from rig import CHAT, RawClient, ask, completion, raw_stream

OLD, NEW = "max_tokens", "max_completion_tokens"
LIMITS = [
    ({NEW: 5}, 5),
    ({OLD: 5}, 5),
    ({OLD: 5, NEW: 5}, 5),
    ({OLD: 9, NEW: 5}, 5),
    ({OLD: 5, NEW: 9}, 9),
    ({OLD: 5, NEW: None}, 5),
    ({OLD: None, NEW: 5}, 5),
    ({NEW: 1}, 1),
    ({NEW: 37}, 37),
]


def asked(path: str, limits: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A request that ends only at its limit."""
    return {**body_for(path, "limits"), "model": "fake", "ignore_eos": True, **limits, **more}


@pytest.fixture(scope="module")
def gateway(module_gateway, fake_worker):
    """A gateway in front of the worker."""
    return module_gateway(fake_worker.url)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("where", ["worker", "gateway"])
async def test_every_name_limits(fake_worker, gateway, dial, where, path) -> None:
    client: RawClient = await dial(fake_worker.url if where == "worker" else gateway.url)
    for limits, tokens in LIMITS:
        body = asked(path, limits)
        whole = await client.ask("POST", path, json.dumps(body).encode())
        assert whole.json["usage"]["completion_tokens"] == tokens, limits
        assert whole.json["choices"][0]["finish_reason"] == "length"
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        stream = await client.ask("POST", path, json.dumps(body).encode())
        *chunks, last = (json.loads(data) for data in stream.events[:-1])
        assert last["usage"]["completion_tokens"] == tokens
        ends = [c["choices"][0]["finish_reason"] for c in chunks]
        assert [end for end in ends if end] == ["length"]


@pytest.mark.parametrize("name", [OLD, NEW])
@pytest.mark.parametrize("value", [0, -1, 2**31, 10**30, "5", 5.5, True, []])
async def test_no_limit_at_all(fake_worker, name, value) -> None:
    for path in (CHAT, COMPLETIONS):
        reply = await ask(fake_worker.url, path, asked(path, {name: value}))
        assert reply.status == 400
        assert reply.json["error"]["param"] == name


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_knows_only_the_older_name(serve, stub, path, stream) -> None:
    worker = await stub(models=("fake",))
    served = await serve(worker)
    worker.plays(raw_stream(b"data: [DONE]\n\n") if stream else completion())
    for limits, tokens in LIMITS:
        sent = json.dumps(asked(path, limits, stream=stream, seed=2**60)).encode()
        await ask(served.url, path, sent)
        got = worker.seen[-1]
        assert got.json[OLD] == tokens, limits
        if limits.get(NEW):
            assert got.json[NEW] == tokens
        kept = {k: v for k, v in got.json.items() if k not in (OLD, "stream_options")}
        assert kept == {k: v for k, v in json.loads(sent).items() if k != OLD}
        if not stream and limits.get(OLD) == tokens:
            assert got.body == sent


async def test_without_a_limit_none_is_made_up(serve, stub) -> None:
    worker = await stub(models=("fake",))
    served = await serve(worker)
    for limits in ({}, {OLD: None}, {NEW: None}, {OLD: None, NEW: None}):
        sent = json.dumps(asked(CHAT, limits)).encode()
        await ask(served.url, CHAT, sent)
        assert worker.seen[-1].body == sent
