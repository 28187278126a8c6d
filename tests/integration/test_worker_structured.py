"""Structured output over HTTP: whole, streamed, several choices, both routes, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.workerrig import CHAT, COMPLETIONS, Client, chat, completion, error_of

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "sunny": {"type": "boolean"},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 60},
    },
    "required": ["city", "sunny", "degrees"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
}


@pytest.fixture
async def client(fake_worker: Any) -> AsyncIterator[Client]:
    async with Client(fake_worker.url) as made:
        yield made


def weather(text: str) -> dict[str, Any]:
    """A decoded answer that follows the schema."""
    value: dict[str, Any] = json.loads(text)
    assert list(value) == ["city", "sunny", "degrees"]
    assert isinstance(value["city"], str)
    assert len(value["city"]) <= 12
    assert isinstance(value["sunny"], bool)
    assert type(value["degrees"]) is int
    assert -50 <= value["degrees"] <= 60
    return value


NOTHING = [
    ("guided_regex", r"[^\s\S]"),
    ("guided_json", {"$ref": "#"}),
    ("guided_json", {"enum": []}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}),
]


@pytest.mark.parametrize(("name", "form"), NOTHING)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_no_answer_fulfils_is_the_clients_fault(
    client: Client, name: str, form: Any, stream: bool
) -> None:
    answer = await client.post(CHAT, chat("x", stream=stream, max_tokens=5, **{name: form}))
    assert answer.status_code == 400
    assert error_of(answer)["param"] == name


@pytest.mark.parametrize("seed", range(5))
async def test_schema_whole_and_streamed(client: Client, seed: int) -> None:
    request = chat(
        "weather?", response_format=FORMAT, temperature=1, seed=seed, logprobs=True, max_tokens=200
    )
    whole = await client.ask(CHAT, request)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "stop"
    weather(choice["message"]["content"])
    stream = await client.stream(CHAT, request)
    assert stream.text() == choice["message"]["content"]
    assert stream.finishes() == ["stop"]
    assert whole["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])


async def test_choices_follow_the_schema_each_for_itself(client: Client) -> None:
    request = chat(
        "weather?", response_format=FORMAT, temperature=1, seed=1, n=4, max_tokens=200, stop=["@"]
    )
    body = await client.ask(CHAT, request)
    texts = [choice["message"]["content"] for choice in body["choices"]]
    for text, choice in zip(texts, body["choices"], strict=True):
        if choice["finish_reason"] == "stop" and "}" in text:
            weather(text)
    assert len(set(texts)) > 1
    stream = await client.stream(CHAT, request)
    assert [stream.text(index) for index in range(4)] == texts


async def test_an_object_a_pattern_a_choice(client: Client) -> None:
    body = await client.ask(
        CHAT, chat("any object", response_format={"type": "json_object"}, max_tokens=2000)
    )
    assert isinstance(json.loads(body["choices"][0]["message"]["content"]), dict)
    for form in ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, {"structured_outputs": {"regex": "a+b"}}):
        body = await client.ask(COMPLETIONS, completion("x", max_tokens=300, **form))
        text = body["choices"][0]["text"]
        assert body["choices"][0]["finish_reason"] in ("stop", "length")
        assert set(text) <= set("abcdef-0123456789")
    body = await client.ask(
        COMPLETIONS, completion(["x", "y", "z"], guided_choice=["left", "right\n"], max_tokens=30)
    )
    assert {choice["text"] for choice in body["choices"]} <= {"left", "right\n"}
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}),
        ("response_format", {"type": "grammar"}),
        ("guided_regex", "(a"),
        ("structured_outputs", {"choice": []}),
    ],
)
async def test_errors_come_before_any_byte_and_name_the_field(
    client: Client, field: str, value: Any, stream: bool
) -> None:
    for path, body in ((CHAT, chat("x")), (COMPLETIONS, completion("x"))):
        answer = await client.post(path, {**body, field: value, "stream": stream})
        assert answer.status_code == 400
        error = error_of(answer)
        assert error["param"] == field
        assert field in error["message"]
    assert (await client.load())["running"] == 0
