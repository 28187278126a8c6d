"""Prompts and usage of Responses and Messages: what counts, what does not, what cannot be told."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import dialogue
from shared.dialogue import MESSAGES, RESPONSES
from shared.openai import MAX_TOKENS, Usage

SYSTEM = {RESPONSES: "instructions", MESSAGES: "system"}
TURNS = {RESPONSES: "input", MESSAGES: "messages"}
KIND = {RESPONSES: "input_text", MESSAGES: "text"}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ROLES = st.sampled_from(["user", "assistant"])
both = pytest.mark.parametrize("route", [RESPONSES, MESSAGES])


def text_of(route: str, turns: Any, **more: Any) -> bytes:
    return dialogue.read(
        route, json.dumps({"model": "m", TURNS[route]: turns, **more}).encode()
    ).text


def turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@both
@given(st.lists(st.tuples(ROLES, TEXT), min_size=1, max_size=6), TEXT)
def test_it_grows_at_its_end(route: str, said: list[tuple[str, str]], system: str) -> None:
    turns = [turn(*each) for each in said]
    texts = [text_of(route, turns[: n + 1], **{SYSTEM[route]: system}) for n in range(len(turns))]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
        assert len(longer) > len(shorter)


@both
@given(st.lists(st.tuples(ROLES, TEXT, TEXT), min_size=1, max_size=4))
def test_parts_and_marks_say_nothing_more(route: str, said: list[tuple[str, str, str]]) -> None:
    plain = [turn(role, one + two) for role, one, two in said]
    parts = [
        {
            "role": role,
            "id": f"msg_{n}",
            "status": "completed",
            "content": [
                {"type": KIND[route], "text": one, "annotations": []},
                {"type": KIND[route], "text": two, "cache_control": {"type": "ephemeral"}},
            ],
        }
        for n, (role, one, two) in enumerate(said)
    ]
    assert text_of(route, plain) == text_of(route, parts)


@both
@pytest.mark.parametrize(
    "change",
    [
        {"role": "assistant"},
        {"content": "other"},
        {"content": [{"type": "image", "source": {"data": "AA"}}]},
        {"content": [{"type": "tool_result", "tool_use_id": "t", "content": "7"}]},
    ],
)
def test_what_is_said_counts(route: str, change: dict[str, Any]) -> None:
    usual = turn("user", "hello")
    assert text_of(route, [usual]) != text_of(route, [usual | change])
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    assert text_of(route, [usual]) != text_of(route, [usual], tools=tools)
    assert text_of(route, [usual]) != text_of(route, [usual], **{SYSTEM[route]: "Be brief."})


def test_a_string_is_one_message_of_the_user() -> None:
    assert text_of(RESPONSES, "hello") == text_of(RESPONSES, [turn("user", "hello")])


def test_calls_of_tools_are_part_of_it() -> None:
    call = {"type": "function_call", "id": "a", "call_id": "c", "name": "f", "arguments": "{}"}
    same, other = call | {"id": "b"}, call | {"arguments": '{"x":1}'}
    assert text_of(RESPONSES, [call]) == text_of(RESPONSES, [same]) != text_of(RESPONSES, [other])


def test_what_else_a_request_says() -> None:
    fields = {
        "input": "x",
        "max_output_tokens": 7,
        "cache_salt": "s",
        "prompt_cache_key": "k" * 999,
        "previous_response_id": "resp_1",
    }
    read = dialogue.read(RESPONSES, json.dumps(fields).encode())
    assert (read.max_tokens, read.salt, read.previous) == (7, "s", "resp_1")
    assert read.session == "k" * 256
    assert dialogue.read(MESSAGES, json.dumps(fields).encode()).previous == ""


@both
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"7", b"{}", b"[" * 100_000],
)
def test_what_is_none_has_no_prompt(route: str, body: bytes) -> None:
    assert dialogue.read(route, body).text == b""


@both
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | TEXT,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=4
            )
        ),
    )
)
def test_odd_turns_are_no_error(route: str, turns: Any) -> None:
    body = json.dumps(
        {TURNS[route]: turns, SYSTEM[route]: turns, "tools": turns, "max_tokens": turns}
    )
    assert dialogue.read(route, body.encode()) == dialogue.read(route, body.encode())


@both
def test_half_characters_are_text_but_no_names(route: str) -> None:
    half = "\ud83c"
    names = {"cache_salt": half, "prompt_cache_key": half, "previous_response_id": half}
    turns = [turn(half, half), {"type": half}, turn("user", [{"type": half}])]
    body = json.dumps({TURNS[route]: turns, SYSTEM[route]: half, "tools": [half], **names})
    read = dialogue.read(route, body.encode())
    assert read.text
    assert (read.salt, read.session, read.previous) == ("", "", "")


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"input_tokens": 9, "output_tokens": 2}, Usage(9, 2)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}}, Usage(9, 0, 8)),
        ({"input_tokens": 9, "input_tokens_details": {}}, Usage(9, 0)),
        ({"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 3}, Usage(9, 3, 8)),
        ({"input_tokens": 1, "cache_read_input_tokens": 0}, Usage(1, 0, 0)),
        (
            {"input_tokens": 1, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 4},
            Usage(13, 0, 8),
        ),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 10}}, None),
        ({"input_tokens": MAX_TOKENS + 1}, None),
        ({"input_tokens": -1}, None),
        ({"output_tokens": 5}, None),
        ([], None),
        (None, None),
    ],
)
def test_usage_of_both_forms(usage: Any, expected: Usage | None) -> None:
    assert dialogue.read_usage(usage) == expected
