"""Short cuts for what nearly all requests and answers look like give what the long way gives."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from shared import laxjson
from shared.errors import BadRequest
from shared.openai import RouteKind, parse, read_usage, usual_usage

COUNTS = st.one_of(
    st.integers(-1, 9), st.just(2**31), st.none(), st.booleans(), st.just(3.0), st.just("4")
)
USAGES = st.fixed_dictionaries(
    {},
    optional={
        "prompt_tokens": COUNTS,
        "completion_tokens": COUNTS,
        "total_tokens": COUNTS,
        "prompt_tokens_details": st.one_of(
            st.none(), st.fixed_dictionaries({}, optional={"cached_tokens": COUNTS})
        ),
    },
)
ANSWERS = st.fixed_dictionaries(
    {"id": st.text(max_size=4)},
    optional={
        "usage": st.one_of(USAGES, st.none(), st.just([])),
        "error": st.one_of(st.none(), st.just({"message": "no"}), st.just("no")),
        "choices": st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=3)), max_size=2),
    },
)
TOLD: dict[str, Any] = {
    "usage": {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
}


def decoded(body: bytes) -> Any:
    try:
        return laxjson.decode(body)
    except laxjson.NotJson:
        return None


@given(answer=ANSWERS)
@example(answer=TOLD)
@example(answer=TOLD | {"error": {"message": "no"}})
@example(answer=TOLD | {"id": "é"})
def test_usage_that_is_read_at_once_is_that_of_the_whole_answer(answer: dict[str, Any]) -> None:
    for ascii_only in (True, False):
        body = json.dumps(answer, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        usage = usual_usage(body)
        if usage is not None:
            assert answer.get("error") is None
            assert usage == read_usage(decoded(body))


def test_a_usual_answer_takes_the_short_cut() -> None:
    usage = usual_usage(msgspec.json.encode(TOLD | {"id": "é", "object": "chat.completion"}))
    assert usage is not None
    assert (usage.prompt, usage.completion, usage.cached) == (5, 2, 4)


@given(body=st.binary(max_size=8), at=st.integers(0, 200))
@example(body=b"\xff", at=8)
def test_what_is_no_json_never_takes_it(body: bytes, at: int) -> None:
    whole = json.dumps({"id": "word", **TOLD}).encode()
    spoilt = whole[:at] + body + whole[at:]
    if usual_usage(spoilt) is not None:
        assert isinstance(decoded(spoilt), dict)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["m", "", None, 1]),
    "stream": st.sampled_from([True, False, None, 1]),
    "max_tokens": st.sampled_from([None, 0, 7, True]),
    "temperature": st.sampled_from([0, 0.5, None]),
    "prompt": st.sampled_from(["text", [1, 2], ["a"], None, 3]),
    "messages": st.sampled_from([[{"role": "user", "content": "x"}], [], None, [{"role": ""}]]),
}
NULLS: dict[str, Any] = dict.fromkeys(
    (
        *("add_generation_prompt", "add_special_tokens", "cache_salt", "chat_template_kwargs"),
        *("continue_final_message", "documents", "max_completion_tokens", "n"),
        *("prompt_cache_key", "session_id", "stream_options", "tools"),
    )
)


def read(kind: RouteKind, fields: dict[str, Any]) -> Any:
    try:
        request = parse(kind, json.dumps(fields).encode())
    except BadRequest as error:
        return str(error)
    kept = msgspec.structs.asdict(request)
    del kept["raw"], kept["fields"]
    return kept


@given(kind=st.sampled_from(RouteKind), fields=st.fixed_dictionaries({}, optional=FIELDS))
def test_a_request_without_rare_fields_is_one_in_which_they_are_null(
    kind: RouteKind, fields: dict[str, Any]
) -> None:
    assert read(kind, fields) == read(kind, fields | NULLS)
    for name in NULLS:
        assert read(kind, fields) == read(kind, fields | {name: None})
