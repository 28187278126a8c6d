"""D13: an end token ends the answer, is counted, and is never part of its text.

The model lists two of them; each is forced with a bias, at once or after five tokens, streamed and
not, on both routes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from workerrig import CHAT, COMPLETIONS, Client, chat, completion

pytestmark = pytest.mark.torch
ENDS = (257, 258)
FORMS = [(CHAT, chat), (COMPLETIONS, completion)]
COUNTED = {"stream_options": {"include_usage": True}}


@pytest.fixture
async def client(torch_worker) -> AsyncIterator[Client]:
    """A client of E."""
    async with Client(torch_worker.url) as made:
        yield made


def text_of(choice: dict[str, Any]) -> str:
    """Of either route."""
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize(("path", "make"), FORMS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("n_tokens", [0, 1, 5])
async def test_the_answer_is_what_came_before(
    client: Client, path: str, make: Any, end: int, n_tokens: int
) -> None:
    plain = make("what is it", max_tokens=max(1, n_tokens), min_tokens=n_tokens, ignore_eos=True)
    before = text_of((await client.ask(path, plain))["choices"][0]) if n_tokens else ""
    body = make("what is it", max_tokens=20, min_tokens=n_tokens, logit_bias={str(end): 100})
    whole = await client.ask(path, body)
    (choice,) = whole["choices"]
    assert text_of(choice) == before
    assert choice["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == n_tokens + 1
    stream = await client.stream(path, {**body, **COUNTED})
    assert stream.text() == before
    assert stream.finishes() == ["stop"]
    assert stream.errors == []
    (usage,) = stream.usages
    assert usage["completion_tokens"] == n_tokens + 1


@pytest.mark.parametrize("end", ENDS)
async def test_at_the_limit_the_end_token_still_counts_as_the_end(client: Client, end: int) -> None:
    body = completion("x", max_tokens=3, min_tokens=2, logit_bias={str(end): 100})
    answer = await client.ask(COMPLETIONS, body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("end", ENDS)
async def test_ignored_ends_are_not_shown_either(client: Client, end: int) -> None:
    body = completion("x", max_tokens=4, ignore_eos=True, logit_bias={str(end): 100})
    answer = await client.ask(COMPLETIONS, body)
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4


async def test_a_stop_token_is_treated_alike(client: Client) -> None:
    body = completion(
        "x", max_tokens=9, min_tokens=2, stop_token_ids=[101], logit_bias={"101": 100}
    )
    answer = await client.ask(COMPLETIONS, body)
    assert "e" not in answer["choices"][0]["text"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3
    stream = await client.stream(COMPLETIONS, body)
    assert stream.text() == answer["choices"][0]["text"]
