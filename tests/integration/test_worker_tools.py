"""Tool calls over HTTP: required, named, auto, several choices; and the real client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.workerrig import CHAT, Client, chat, error_of

pytest.importorskip("llguidance")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture
async def client(fake_worker: Any) -> AsyncIterator[Client]:
    async with Client(fake_worker.url) as made:
        yield made


def gathered(stream: Any, index: int) -> list[dict[str, Any]]:
    """Calls of one choice of a stream, without their ids."""
    calls: list[dict[str, Any]] = []
    for choice in stream.choices(index):
        for piece in choice["delta"].get("tool_calls", []):
            if piece["index"] == len(calls):
                assert piece["id"]
                calls.append(dict(piece["function"]))
            else:
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return calls


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_enforced_calls_whole_and_streamed(client: Client, choice: Any) -> None:
    request = chat(
        "go", tools=TOOLS, tool_choice=choice, temperature=1, seed=3, n=3, max_tokens=3000
    )
    body = await client.ask(CHAT, request)
    stream = await client.stream(CHAT, request)
    for index, made in enumerate(body["choices"]):
        assert made["finish_reason"] == "tool_calls"
        assert made["message"]["content"] is None
        calls = made["message"]["tool_calls"]
        for call in calls:
            assert call["type"] == "function"
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "weather":
                assert arguments["city"] in ("Paris", "Oslo")
            else:
                assert (call["function"]["name"], arguments) == ("now", {})
        if choice == NAMED:
            assert [call["function"]["name"] for call in calls] == ["weather"]
        assert gathered(stream, index) == [call["function"] for call in calls]
        assert stream.text(index) == ""
        assert stream.finishes(index) == ["tool_calls"]
    ids = [call["id"] for made in body["choices"] for call in made["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("choice", ["auto", None, "none"])
async def test_calls_in_free_text(client: Client, choice: Any) -> None:
    said = (
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    )
    request = chat("go", tools=TOOLS, tool_choice=choice, guided_choice=[said], max_tokens=200)
    body = await client.ask(CHAT, request)
    (made,) = body["choices"]
    stream = await client.stream(CHAT, request)
    if choice == "none":
        assert made["message"]["content"] == said == stream.text()
        assert made["finish_reason"] == "stop"
        return
    assert made["message"]["content"] == "Let me see." == stream.text()
    (call,) = made["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert gathered(stream, 0) == [call["function"]]
    assert stream.finishes() == [made["finish_reason"]] == ["tool_calls"]


async def test_a_call_that_is_cut_off_is_content(client: Client) -> None:
    request = chat("go", tools=TOOLS, tool_choice=NAMED, max_tokens=30)
    body = await client.ask(CHAT, request)
    (made,) = body["choices"]
    assert made["finish_reason"] == "length"
    assert made["message"]["content"].startswith('<tool_call>\n{"name": "weather"')
    assert "tool_calls" not in made["message"]
    stream = await client.stream(CHAT, request)
    assert stream.text() == made["message"]["content"]
    assert stream.finishes() == ["length"]


async def test_arguments_come_as_they_are_generated(client: Client) -> None:
    texts = [json.dumps({"city": "Oslo", "note": "x" * 60}), "{}", '{"a": {"b": "}</tool_call>"}}']
    said = "Now.\n" + "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
        for name, text in zip(("weather", "now", "now"), texts, strict=True)
    )
    request = chat("go", tools=TOOLS, guided_choice=[said], max_tokens=400)
    stream = await client.stream(CHAT, request)
    (made,) = (await client.ask(CHAT, request))["choices"]
    pieces = [p for c in stream.choices() for p in c["delta"].get("tool_calls", [])]
    assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
    for number, text in enumerate(texts):
        head, *rest = [piece for piece in pieces if piece["index"] == number]
        assert set(head) == {"index", "id", "type", "function"}
        assert head["function"]["arguments"] == ""
        assert all(set(piece) == {"index", "function"} for piece in rest)
        given = [piece["function"]["arguments"] for piece in rest]
        assert "".join(given) == text
        assert len(given) >= len(text) - 2
        assert all(given)
        whole = made["message"]["tool_calls"][number]
        assert whole["function"] == {"name": head["function"]["name"], "arguments": text}
    assert stream.text() == made["message"]["content"] == "Now."


async def test_a_call_that_is_cut_off_in_its_arguments(client: Client) -> None:
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    request = chat("go", tools=TOOLS, guided_choice=[said])
    for limit in (*range(1, len(said), 9), 44, 45, 46, 47, len(said) - 14, len(said) - 13):
        cut = {**request, "max_tokens": limit}
        (made,) = (await client.ask(CHAT, cut))["choices"]
        stream = await client.stream(CHAT, cut)
        assert gathered(stream, 0) == [
            call["function"] for call in made["message"].get("tool_calls", [])
        ]
        assert stream.text() == (made["message"]["content"] or "")
        assert stream.finishes() == [made["finish_reason"]] == ["length"]


async def test_a_conversation_goes_on_with_the_results(client: Client) -> None:
    request = chat("go", tools=TOOLS, tool_choice=NAMED, max_tokens=500)
    message = (await client.ask(CHAT, request))["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "7 degrees"}
        for call in message["tool_calls"]
    ]
    history = [*request["messages"], message, *results]
    body = await client.ask(CHAT, {**request, "messages": history, "tool_choice": "none"})
    assert body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("shape", ["missing", "null", "list"])
@pytest.mark.parametrize("arguments", ["{}", "null", ""])
async def test_histories_with_calls_and_no_content(
    client: Client, shape: str, arguments: str
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    said: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if shape != "missing":
        said["content"] = None if shape == "null" else []
    result = {"role": "tool", "tool_call_id": "c1", "content": "7"}
    for messages in ([said, result], [{**said, "tool_calls": []}]):
        body = chat("go", tools=TOOLS, max_tokens=3)
        answer = await client.post(
            CHAT, {**body, "messages": [*body["messages"], *messages, *body["messages"]]}
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "sometimes"}),
        ("tools", {"tools": [{"type": "function", "function": {}}]}),
        (
            "tools",
            {
                "tools": [{**NOW, "function": {"name": "f", "parameters": {"type": "foo"}}}],
                "tool_choice": "required",
            },
        ),
    ],
)
async def test_errors(client: Client, param: str, fields: dict[str, Any], stream: bool) -> None:
    answer = await client.post(CHAT, chat("go", **fields, stream=stream))
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


async def test_the_real_client_understands_the_stream(fake_worker: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{fake_worker.url}/v1", api_key="none") as sdk:
        tools: Any = TOOLS
        async with sdk.chat.completions.stream(
            model="fake",
            messages=[{"role": "user", "content": "go"}],
            tools=tools,
            tool_choice="required",
            max_tokens=3000,
            seed=1,
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert isinstance(json.loads(call.function.arguments), dict)
