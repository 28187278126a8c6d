"""A10: explicit nulls. Null is the same as absent, for each optional field alone and for all.

Sent to the worker and through the gateway, whole and streamed; the answer with nulls must be the
answer without the fields.
"""

from __future__ import annotations

import json

import pytest
from caserig import COMPLETIONS, body_for
from conftest import WorkerProcess
from rig import CHAT, RawClient, Reply

from worker.requests import NEUTRAL, SUPPORTED, WITHOUT_EFFECT

NEEDED = {CHAT: {"messages"}, COMPLETIONS: {"prompt"}}
OPTIONAL = sorted((SUPPORTED | WITHOUT_EFFECT | NEUTRAL.keys()) - {"messages", "prompt"})
ASKED = (
    "max_tokens max_completion_tokens temperature top_p n stop seed logprobs top_logprobs stream "
    "stream_options tools user logit_bias"
).split()
"""Those of the case."""
OURS = ["session_id", "never_heard_of"]


@pytest.fixture(scope="module")
def gateway(module_gateway, fake_worker: WorkerProcess):
    """A gateway in front of the worker."""
    return module_gateway(fake_worker.url)


@pytest.fixture(params=["worker", "gateway"])
async def client(request, fake_worker: WorkerProcess, gateway, dial) -> RawClient:
    """A connection to either."""
    made: RawClient = await dial(fake_worker.url if request.param == "worker" else gateway.url)
    return made


def told(reply: Reply) -> tuple[str, list[str]]:
    """(texts, finish reasons), whole or streamed."""
    assert reply.status == 200, reply.body
    bodies = [reply.json] if reply.header("content-type") == "application/json" else []
    bodies += [json.loads(data) for data in reply.events if data != "[DONE]"]
    choices = [choice for body in bodies for choice in body["choices"]]
    texts = []
    for choice in choices:
        said = choice.get("message") or choice.get("delta") or {}
        texts.append(choice.get("text") or said.get("content") or "")
    return "".join(texts), [c["finish_reason"] for c in choices if c["finish_reason"]]


async def said(client: RawClient, path: str, body: dict) -> tuple[str, list[str]]:
    """What a body is answered with."""
    return told(await client.ask("POST", path, json.dumps(body).encode()))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_one_null_at_a_time(client, path) -> None:
    base = {**body_for(path, "nulls", temperature=0), "model": "fake", "max_tokens": 6}
    plain = await said(client, path, base)
    for name in (*OPTIONAL, *OURS):
        if name in base:
            continue
        for stream in ({}, {"stream": True}):
            if name not in stream:
                assert await said(client, path, {**base, **stream, name: None}) == plain, name


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("names", [ASKED, OPTIONAL], ids=["asked", "all"])
async def test_all_nulls_at_once(client, path, names) -> None:
    kept = {"model": "fake", "temperature": 0, "max_tokens": 9}
    plain = await said(client, path, {**body_for(path, "all nulls"), **kept})
    nulls = {**body_for(path, "all nulls"), **dict.fromkeys(names), **kept}
    assert await said(client, path, nulls) == plain
    assert await said(client, path, {**nulls, "stream": True}) == plain
    # Without a limit and a temperature a bias makes the answer end, and be the same.
    bias = {"257": 100}
    free = {**body_for(path, "all nulls"), **dict.fromkeys(names), "logit_bias": bias}
    assert await said(client, path, {**free, "model": "fake"}) == ("", ["stop"])


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "max_completion_tokens", "n"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_nulls_mean_the_defaults(client, path, name) -> None:
    """Where the default is visible: 1 choice, and 16 tokens of a completion."""
    base = {**body_for(path, "defaults"), "model": "fake", "seed": 3, "ignore_eos": True}
    if path == CHAT:
        base["max_tokens"] = 16
    given = base if name in base else {**base, name: None}
    reply = await client.ask("POST", path, json.dumps(given).encode())
    assert len(reply.json["choices"]) == 1
    assert reply.json["usage"]["completion_tokens"] == 16
    assert told(reply) == await said(client, path, base)


@pytest.mark.parametrize(
    "nested",
    [
        {"stream_options": {"include_usage": None}},
        {"stream_options": {"include_usage": None, "continuous_usage_stats": None}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"logit_bias": {}},
        {"stop": []},
        {"tools": []},
        {"tool_choice": None, "tools": []},
        {"chat_template_kwargs": {"tools": None}},
        {"structured_outputs": None, "guided_json": None},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]},
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "description": None, "strict": None},
                }
            ]
        },
    ],
    ids=lambda nested: json.dumps(nested)[:60],
)
async def test_nulls_within_fields(client, nested) -> None:
    base = {**body_for(CHAT, "nested", temperature=0), "model": "fake", "max_tokens": 6}
    whole = await said(client, CHAT, {**base, **nested})
    assert whole == await said(client, CHAT, {**base, **nested, "stream": True})
    if not nested.get("tools"):
        assert whole == await said(client, CHAT, base)


@pytest.mark.parametrize(
    "message",
    [
        {"name": None, "tool_calls": None, "tool_call_id": None, "refusal": None, "audio": None},
        {"function_call": None, "reasoning_content": None, "annotations": None},
    ],
)
async def test_nulls_within_messages(client, message) -> None:
    base = {**body_for(CHAT, "hello", temperature=0), "model": "fake", "max_tokens": 6}
    told_plain = await said(client, CHAT, base)
    with_nulls = {**base, "messages": [{**base["messages"][0], **message}]}
    assert await said(client, CHAT, with_nulls) == told_plain


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_needed_cannot_be_null(client, path) -> None:
    for name in NEEDED[path]:
        body = {**body_for(path), "model": "fake", name: None}
        reply = await client.ask("POST", path, json.dumps(body).encode())
        assert reply.status == 400
        assert reply.json["error"]["param"] == name
