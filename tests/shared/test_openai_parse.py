"""What the request view accepts, refuses and reads (cases A08, A10, A12, A13)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.errors import BadRequest, NoCapacity
from shared.openai import RouteKind, error_body, parse, read_usage, usage_body

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any):
    return parse(RouteKind.CHAT, json.dumps({"messages": HI, **fields}).encode())


def complete(**fields: Any):
    return parse(RouteKind.COMPLETIONS, json.dumps({"prompt": "hi", **fields}).encode())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"m",x}', None),
        (b"[]", None),
        (b'"str"', None),
        (b"", None),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":"hi"}', "messages"),
        (b'{"model":"m","messages":[]}', "messages"),
        (b'{"model":"m","messages":[{"role":"user"}],"temperature":"hot"}', "temperature"),
        (b'{"messages":[{"role":"user","content":"x"}],"n":0,"stream":true}', "n"),
        (b"[" * 10_000, None),
        (b'{"messages":' + b"[" * 10_000, None),
        (b"\xff\xfe\x7b", None),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', None),
        (b'{"messages":["hi"]}', "messages[0]"),
        (b'{"messages":[{"content":"x"}]}', "messages[0].role"),
        (b'{"messages":[{"role":7,"content":"x"}]}', "messages[0].role"),
        (b'{"messages":[{"role":"user","content":7}]}', "messages[0].content"),
        (b'{"messages":[{"role":"user","content":[7]}]}', "messages[0].content[0]"),
        (b'{"messages":[{"role":"user","content":[{"type":"text"}]}]}',
         "messages[0].content[0].text"),
        (b'{"messages":[{"role":"assistant","tool_calls":"x"}]}', "messages[0].tool_calls"),
        (b'{"messages":[{"role":"user"}],"stream":"yes"}', "stream"),
        (b'{"messages":[{"role":"user"}],"n":true}', "n"),
        (b'{"messages":[{"role":"user"}],"max_tokens":1.5}', "max_tokens"),
        (b'{"messages":[{"role":"user"}],"model":5}', "model"),
        (b'{"messages":[{"role":"user"}],"tools":[1]}', "tools"),
        (b'{"messages":[{"role":"user"}],"stop":[1]}', "stop"),
        (b'{"messages":[{"role":"user"}],"stream_options":{"include_usage":1}}',
         "stream_options.include_usage"),
        (b'{"messages":[{"role":"user"}],"continue_final_message":true,'
         b'"add_generation_prompt":true}', "continue_final_message"),
    ],
)  # fmt: skip
def test_malformed_chats_are_refused_with_the_field_to_blame(body: bytes, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(RouteKind.CHAT, body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert "Traceback" not in caught.value.message


NULLED = (
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed"),
    *("logprobs", "top_logprobs", "stream", "stream_options", "tools", "user", "logit_bias"),
    *("model", "cache_salt", "chat_template_kwargs", "add_generation_prompt", "documents"),
)


@pytest.mark.parametrize("make", [chat, complete])
def test_null_is_the_same_as_absent(make) -> None:
    nulled, absent = make(**dict.fromkeys(NULLED)), make()
    for name in type(absent).__slots__:
        if name not in {"raw", "fields", "__weakref__"}:
            assert getattr(nulled, name) == getattr(absent, name), name
    assert (absent.n, absent.stream, absent.include_usage, absent.max_tokens) == (
        1,
        False,
        False,
        None,
    )


def test_fields_of_a_full_chat() -> None:
    request = chat(
        model="m", stream=True, stream_options={"include_usage": True}, max_tokens=5,
        max_completion_tokens=7, n=2, tools=[{"type": "function"}], cache_salt="s", user="u",
        session_id="z", chat_template_kwargs={"a": 1}, unknown={"big": 10**30},
    )  # fmt: skip
    assert (request.model, request.stream, request.include_usage) == ("m", True, True)
    assert (request.max_tokens, request.n, request.session) == (7, 2, "z")
    assert request.cache_salt == "s"
    assert request.chat_template_kwargs == {"a": 1}
    assert request.fields["unknown"] == {"big": 10**30}
    assert (request.add_generation_prompt, request.continue_final_message) == (True, False)
    assert not request.add_special_tokens


def test_user_is_no_session_and_an_empty_model_is_none() -> None:
    assert chat(user="someone").session is None
    assert chat(prompt_cache_key="k").session == "k"
    assert chat(model="").model is None


def test_continuing_leaves_the_generation_prompt_out() -> None:
    request = chat(continue_final_message=True)
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": "a"}], ["a", "b"]])
def test_content_forms_are_accepted(content: object) -> None:
    assert chat(messages=[{"role": "assistant", "content": content}]).messages is not None


@pytest.mark.parametrize("prompt", ["", "hi", ["a", "b"], [1, 2], [0, 2**32 - 1], [[1], [2, 3]]])
def test_prompt_forms_are_accepted(prompt: object) -> None:
    request = complete(prompt=prompt)
    assert request.prompt == prompt
    assert request.add_special_tokens


@pytest.mark.parametrize(
    "prompt",
    [None, [], 5, {}, [1, "a"], [True], [1.5], [-1], [2**32], [[]], [[1], ["a"]], [[1], 2]],
)
def test_prompts_of_other_forms_are_refused(prompt: object) -> None:
    with pytest.raises(BadRequest) as caught:
        complete(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({}, None),
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {}}, None),
        ({"prompt_tokens_details": {"cached_tokens": None}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 64}}, 64),
        ({"prompt_tokens_details": {"cached_tokens": "many"}}, None),
    ],
)
def test_cached_tokens_not_reported_is_not_zero(
    details: dict[str, Any], cached: int | None
) -> None:
    usage = read_usage({"usage": {"prompt_tokens": 70, "completion_tokens": 3, **details}})
    assert usage is not None
    assert (usage.prompt, usage.completion, usage.cached) == (70, 3, cached)


@pytest.mark.parametrize("obj", [None, [], "x", {}, {"usage": None}, {"usage": {}}, {"usage": []}])
def test_no_usage_is_none(obj: object) -> None:
    assert read_usage(obj) is None


def test_usage_written_is_usage_read() -> None:
    for cached in (None, 0, 16):
        written = usage_body(read_usage({"usage": usage_of(cached)}))  # type: ignore[arg-type]
        assert written == {**usage_of(cached), "total_tokens": 23}


def usage_of(cached: int | None) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt_tokens": 20, "completion_tokens": 3}
    return body if cached is None else {**body, "prompt_tokens_details": {"cached_tokens": cached}}


def test_error_body_has_the_openai_shape() -> None:
    body = json.loads(error_body(NoCapacity("full\nnow", retry_after_s=1.0)))
    expected = {
        "message": "full\nnow",
        "type": "server_error",
        "param": None,
        "code": "no_capacity",
    }
    assert body == {"error": expected}


def test_who_asks_for_the_log_probabilities_of_the_prompt() -> None:
    assert chat(prompt_logprobs=0).scores_prompt
    assert complete(prompt_logprobs=3).scores_prompt
    assert complete(echo=True, logprobs=0).scores_prompt
    for others in ({}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": False}):
        assert not complete(**others).scores_prompt
    assert not chat(logprobs=True, echo=True).scores_prompt
    assert not chat(prompt_logprobs=None).scores_prompt
