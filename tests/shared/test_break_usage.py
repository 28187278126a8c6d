"""Usage as broken or hostile engines report it, and JSON as lax encoders write it."""

from __future__ import annotations

import pytest

from shared import laxjson
from shared.openai import MAX_TOKENS, Usage, read_usage


def usage(prompt: object, completion: object, cached: object) -> dict:
    details = {"cached_tokens": cached}
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
        }
    }


@pytest.mark.parametrize("value", [-1, 1.0, "1", True, None, [], 2**31, 2**63, 10**30, 10**400])
def test_what_is_no_token_count_is_not_known(value: object) -> None:
    assert read_usage(usage(value, 1, 0)) is None
    assert read_usage(usage(7, value, 0)) == Usage(7, 0, 0)
    assert read_usage(usage(7, 1, value)) == Usage(7, 1, None)


def test_the_largest_count_is_one() -> None:
    assert read_usage(usage(MAX_TOKENS, MAX_TOKENS, MAX_TOKENS)) == Usage(
        MAX_TOKENS, MAX_TOKENS, MAX_TOKENS
    )


def test_more_cached_than_there_was_is_not_known() -> None:
    assert read_usage(usage(7, 1, 7)) == Usage(7, 1, 7)
    assert read_usage(usage(7, 1, 8)) == Usage(7, 1, None)


@pytest.mark.parametrize(
    "text", ['{"a":"\\ud83c"}', '{"a":NaN}', '{"a":-Infinity}', '{"a":1e999}', '{"a":"\\udf0d x"}']
)
def test_what_pythons_encoder_writes_is_read_and_can_be_written(text: str) -> None:
    value = laxjson.decode(text)
    assert isinstance(value, dict)
    assert laxjson.decode(text.encode()).keys() == value.keys()
    assert laxjson.encode(value).startswith(b'{"a":')


@pytest.mark.parametrize("text", ["", "{", "{x", '{"a":}', "[" * 100_000, "9" * 5000, '"\\u12"'])
def test_what_nobody_reads_is_no_json(text: str) -> None:
    with pytest.raises(laxjson.NotJson):
        laxjson.decode(text)
