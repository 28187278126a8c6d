"""What a generation request may ask, and how refusals name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.errors import BadRequest, ContextLengthExceeded
from shared.openai import GenerateRequest, RouteKind, parse
from worker.requests import (
    Ask,
    Limits,
    check_sequences,
    read_ask,
    with_room,
)

LIMITS = Limits(vocab_size=300, max_tokens=100)


def ask(kind: RouteKind = RouteKind.CHAT, **fields: Any) -> Ask:
    body: dict[str, Any] = {"model": "m"}
    if kind is RouteKind.CHAT:
        body["messages"] = [{"role": "user", "content": "hi"}]
    else:
        body["prompt"] = "hi"
    return read_ask(parse(kind, json.dumps({**body, **fields}).encode()), LIMITS)


def refused(kind: RouteKind = RouteKind.CHAT, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        ask(kind, **fields)
    return caught.value


def test_defaults_are_openai_defaults() -> None:
    plain = ask()
    assert plain.params.temperature == 1.0
    assert plain.params.top_p == 1.0
    assert plain.params.top_k == 0
    assert plain.params.seed is None
    assert plain.params.logprobs is None
    assert (plain.n, plain.stream, plain.include_usage, plain.salt) == (1, False, False, "")
    assert plain.max_tokens is None


def test_every_sampling_field_arrives() -> None:
    got = ask(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=42,
        n=3,
        stop=["a", "b"],
        stop_token_ids=[5],
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"7": -100},
        logprobs=True,
        top_logprobs=4,
        max_completion_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        cache_salt="s",
        priority=-3,
        stream=True,
        stream_options={"include_usage": True},
    )
    params = got.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.seed, params.stop, params.stop_token_ids) == (42, ("a", "b"), (5,))
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.0)
    assert (params.repetition_penalty, params.logit_bias) == (1.2, {7: -100.0})
    assert (params.logprobs, params.min_tokens, params.ignore_eos) == (4, 2, True)
    assert (got.n, got.max_tokens, got.salt, got.priority) == (3, 9, "s", -3)
    assert got.stream
    assert got.include_usage


NULLS = (
    "max_tokens max_completion_tokens temperature top_p n stop seed logprobs top_logprobs stream "
    "stream_options tools user logit_bias response_format tool_choice suffix best_of"
).split()


@pytest.mark.parametrize("kind", list(RouteKind))
def test_null_is_the_same_as_absent(kind: RouteKind) -> None:
    assert ask(kind, **dict.fromkeys(NULLS)) == ask(kind)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("seed", 2**80),
        ("seed", "x"),
        ("n", 0),
        ("n", 129),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop", {"a": 1}),
        ("stop_token_ids", [300]),
        ("stop_token_ids", "7"),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", {"300": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"7": 101}),
        ("logit_bias", [1]),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("ignore_eos", "yes"),
        ("cache_salt", 7),
        ("cache_salt", ""),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": 7}}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("structured_outputs", {}),
        ("structured_outputs", {"json": {}, "regex": "a"}),
        ("structured_outputs", {"grammar": "root ::= x"}),
        ("structured_outputs", {"json": "{"}),
        ("structured_outputs", "json"),
        ("guided_json", 7),
        ("guided_regex", ["a"]),
        ("guided_choice", []),
        ("guided_choice", ["a", 7]),
        ("guided_grammar", "root ::= x"),
        ("reasoning_effort", "low"),
        ("best_of", 2),
        ("suffix", "tail"),
    ],
)
@pytest.mark.parametrize("kind", list(RouteKind))
def test_wrong_values_are_refused_by_name(kind: RouteKind, field: str, value: Any) -> None:
    error = refused(kind, **{field: value})
    assert error.status == 400
    assert (error.param or "").startswith(field)
    assert field in error.message


def test_logprobs_have_another_meaning_in_each_form() -> None:
    assert ask(logprobs=True).params.logprobs == 0
    assert ask(logprobs=False).params.logprobs is None
    assert refused(logprobs=3).param == "logprobs"
    assert refused(top_logprobs=3).param == "top_logprobs"
    assert refused(logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert ask(RouteKind.COMPLETIONS, logprobs=3).params.logprobs == 3
    assert ask(RouteKind.COMPLETIONS, logprobs=0).params.logprobs == 0
    assert refused(RouteKind.COMPLETIONS, logprobs=True).param == "logprobs"
    assert refused(RouteKind.COMPLETIONS, logprobs=21).param == "logprobs"
    assert ask(RouteKind.COMPLETIONS, echo=True, logprobs=1).params.prompt_logprobs == 1
    assert ask(RouteKind.COMPLETIONS, echo=True).params.prompt_logprobs is None
    assert ask(RouteKind.COMPLETIONS, logprobs=1).params.prompt_logprobs is None
    assert refused(echo=True).param == "echo"


@pytest.mark.parametrize("kind", list(RouteKind))
def test_prompt_logprobs(kind: RouteKind) -> None:
    assert ask(kind, prompt_logprobs=0).params.prompt_logprobs == 0
    assert ask(kind, prompt_logprobs=20).prompt_logprobs == 20
    for wrong in (21, -1, "3", True):
        assert refused(kind, prompt_logprobs=wrong).param == "prompt_logprobs"
    assert refused(kind, prompt_logprobs=0, stream=True).param == "prompt_logprobs"
    more = ask(RouteKind.COMPLETIONS, echo=True, logprobs=2, prompt_logprobs=5)
    assert (more.params.prompt_logprobs, more.prompt_logprobs, more.params.logprobs) == (5, 5, 2)


def test_an_empty_nucleus_is_its_best_token() -> None:
    params = ask(top_p=0).params
    assert (params.top_k, params.top_p) == (1, 1.0)


def test_fields_without_effect_are_accepted_and_unknown_ones_named() -> None:
    got = ask(
        store=True,
        metadata={"a": "b"},
        user="u",
        service_tier="auto",
        best_of=1,
        response_format={"type": "text"},
        tool_choice="auto",
        frobnicate=1,
    )
    assert got.unknown == ("frobnicate",)


def test_min_tokens_above_max_tokens() -> None:
    assert refused(min_tokens=6, max_tokens=5).param == "min_tokens"


def test_the_newer_limit_wins() -> None:
    assert ask(max_tokens=9, max_completion_tokens=5).max_tokens == 5


def test_room_for_the_answer() -> None:
    assert with_room(ask(), 60, LIMITS) == 40
    assert with_room(ask(RouteKind.COMPLETIONS), 60, LIMITS) == 16
    assert with_room(ask(RouteKind.COMPLETIONS), 95, LIMITS) == 5
    assert with_room(ask(max_tokens=40), 60, LIMITS) == 40
    for request, prompt in ((ask(), 100), (ask(max_tokens=41), 60), (ask(min_tokens=50), 60)):
        with pytest.raises(ContextLengthExceeded) as caught:
            with_room(request, prompt, LIMITS)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"


def test_too_many_sequences() -> None:
    def of(prompts: int) -> GenerateRequest:
        body = {"model": "m", "prompt": ["x"] * prompts}
        return parse(RouteKind.COMPLETIONS, json.dumps(body).encode())

    check_sequences(of(16), 128, 4096)
    check_sequences(of(1), 4, 4)
    for prompts, n, waiting, blamed in ((17, 128, 4096, "n"), (3, 1, 2, "prompt"), (1, 5, 4, "n")):
        with pytest.raises(BadRequest) as caught:
            check_sequences(of(prompts), n, waiting)
        assert caught.value.param == blamed
