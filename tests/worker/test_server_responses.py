"""OpenAI's shapes from deltas, single tokens as text, and merging of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from shared.errors import BadRequest, InternalError, NoCapacity
from shared.render import byte_bundle
from worker.chatshape import ChatShape
from worker.fanout import merge
from worker.generation import Delta
from worker.responses import Answer, CompletionShape, Head, Shown, failure, usage_of
from worker.runner import TokenLogprob
from worker.sequence import FinishReason
from worker.tokentext import TokenText

TOKENS = TokenText(Tokenizer.from_str(byte_bundle().tokenizer_json))
EARTH = "🌍".encode()


def delta(
    text: str,
    tokens: tuple[int, ...] = (),
    finish: FinishReason | None = None,
    *,
    logprobs: bool = False,
    cached: int = 0,
    output: int = 0,
) -> Delta:
    entries = tuple(TokenLogprob(-0.5, ((token, -0.5), (32, -2.0))) for token in tokens)
    return Delta(text, tokens, entries if logprobs else None, finish, cached, 10, output)


def head(include_usage: bool = False) -> Head:
    return Head("id-1", 7, "m", include_usage)


# --- usage and failures ------------------------------------------------------------------------


def answer(prompt: int, prompt_tokens: int, output: int, cached: int) -> Answer:
    return Answer(prompt, prompt_tokens=prompt_tokens, output_tokens=output, cached_tokens=cached)


def test_a_prompt_counts_once_with_what_its_least_lucky_choice_found() -> None:
    answers = [answer(0, 100, 5, 96), answer(0, 100, 6, 32), answer(1, 50, 7, 16)]
    assert usage_of(answers) == {
        "prompt_tokens": 150,
        "completion_tokens": 18,
        "total_tokens": 168,
        "prompt_tokens_details": {"cached_tokens": 48},
    }


def test_ends_that_are_no_answer_are_errors() -> None:
    assert failure(delta("x")) is None
    assert failure(delta("x", finish=FinishReason.STOP)) is None
    assert isinstance(failure(delta("", finish=FinishReason.ERROR)), InternalError)
    assert isinstance(failure(delta("", finish=FinishReason.ABORT)), NoCapacity)
    assert isinstance(failure(delta("", finish=FinishReason.GRAMMAR)), BadRequest)


# --- chat --------------------------------------------------------------------------------------


def test_chat_chunks() -> None:
    shape = ChatShape(head(), TOKENS)
    (role,) = shape.opening(2, delta(""))
    assert role == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 2,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    assert shape.chunks(0, delta("")) == []
    text, end = shape.chunks(0, delta("ab", finish=FinishReason.LENGTH))
    assert text["choices"][0]["delta"] == {"content": "ab"}
    assert text["choices"][0]["finish_reason"] is None
    assert end["choices"][0]["delta"] == {}
    assert end["choices"][0]["finish_reason"] == "length"
    assert shape.closing([answer(0, 1, 1, 0)]) == []


def test_chat_usage_comes_alone_and_last() -> None:
    shape = ChatShape(head(include_usage=True), TOKENS)
    assert shape.chunks(0, delta("a"))[0]["usage"] is None
    (last,) = shape.closing([answer(0, 3, 2, 0)])
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


def test_chat_logprobs_are_kept_without_text() -> None:
    shape = ChatShape(head(), TOKENS)
    (chunk,) = shape.chunks(0, delta("", (EARTH[0],), logprobs=True))
    (entry,) = chunk["choices"][0]["logprobs"]["content"]
    assert entry == {
        "token": "bytes:\\xf0",
        "logprob": -0.5,
        "bytes": [0xF0],
        "top_logprobs": [
            {"token": "bytes:\\xf0", "logprob": -0.5, "bytes": [0xF0]},
            {"token": " ", "logprob": -2.0, "bytes": [32]},
        ],
    }


def test_chat_body() -> None:
    one = Answer(0)
    one.add(delta("he", (104, 101), logprobs=True, output=2))
    one.add(delta("y", (121,), FinishReason.STOP, logprobs=True, cached=0, output=3))
    body = ChatShape(head(), TOKENS).whole([one])
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "hey", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["h", "e", "y"]
    assert body["usage"]["completion_tokens"] == 3


# --- completions -------------------------------------------------------------------------------


def test_completion_offsets_count_characters_across_chunks() -> None:
    shape = CompletionShape(head(), TOKENS)
    tokens = (97, *EARTH, 98)
    offsets = []
    for token in tokens:
        (chunk,) = shape.chunks(0, delta("", (token,), logprobs=True))
        offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 1, 1, 2]
    one = Answer(0)
    one.add(delta("a🌍b", tokens, FinishReason.LENGTH, logprobs=True))
    whole = CompletionShape(head(), TOKENS).whole([one])["choices"][0]
    assert whole["logprobs"]["text_offset"] == offsets
    assert whole["logprobs"]["token_logprobs"] == [-0.5] * 6


def test_completion_text_and_finish_share_a_chunk() -> None:
    shape = CompletionShape(head(), TOKENS)
    (chunk,) = shape.chunks(1, delta("ab", finish=FinishReason.STOP))
    assert chunk["object"] == "text_completion"
    assert chunk["choices"] == [
        {"index": 1, "text": "ab", "logprobs": None, "finish_reason": "stop"}
    ]
    assert shape.opening(1, delta("")) == []
    assert shape.chunks(1, delta("")) == []


def test_echo_belongs_to_its_prompt() -> None:
    shape = CompletionShape(head(), TOKENS, Shown(n=2, echoes=["one ", "two "]))
    assert [shape.opening(index, delta(""))[0]["choices"][0]["text"] for index in range(4)] == [
        "one ",
        "one ",
        "two ",
        "two ",
    ]


def test_impossible_logprobs_are_json() -> None:
    entry = TokenLogprob(float("-inf"), ((97, float("-inf")),))
    one = Answer(0, texts=["a"], entries=[(97, entry)])
    logprobs = CompletionShape(head(), TOKENS).whole([one])["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert logprobs["top_logprobs"] == [{"a": -9999.0}]


def scored(prompt: tuple[int, ...], *more: tuple[int, float]) -> Delta:
    """The first delta of an answer whose prompt's tokens got -1, -2, ..."""
    entries = tuple(
        TokenLogprob(-1.0 - place, ((65, -0.25), *more), rank=7 + place)
        for place, _ in enumerate(prompt[1:])
    )
    own = (TokenLogprob(-0.5, ((98, -0.5),), rank=1),)
    return Delta("b", (98,), own, None, 0, len(prompt), 1, prompt_logprobs=entries)


def test_the_log_probabilities_of_an_echoed_prompt_come_first() -> None:
    prompt = (256, *EARTH, 97)
    shown = Shown([prompt], echoes=["🌍a"])
    first = scored(prompt)
    streamed = CompletionShape(head(), TOKENS, shown)
    chunks = [*streamed.opening(0, first), *streamed.chunks(0, first)]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [part["text"] for part in parts] == ["🌍a", "b"]
    one = Answer(0)
    one.add(first)
    whole = CompletionShape(head(), TOKENS, shown).whole([one])["choices"][0]
    assert whole["text"] == "🌍ab"
    for name, value in whole["logprobs"].items():
        assert [item for part in parts for item in part["logprobs"][name]] == value
    assert whole["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -5.0, -0.5]
    assert whole["logprobs"]["text_offset"] == [0, 0, 0, 0, 0, 1, 2]
    assert whole["logprobs"]["tokens"][-2:] == ["a", "b"]
    assert whole["logprobs"]["top_logprobs"][0] is None
    assert whole["logprobs"]["top_logprobs"][5] == {"A": -0.25, "a": -5.0}


def test_special_tokens_that_are_written_out_count_in_offsets() -> None:
    prompt = (97, 256, 98)
    shown = Shown([prompt], echoes=["a<|im_start|>b"])
    one = Answer(0)
    one.add(scored(prompt))
    whole = CompletionShape(head(), TOKENS, shown).whole([one])["choices"][0]
    assert whole["logprobs"]["text_offset"] == [0, 1, 13, 14]


def test_prompt_logprobs_in_vllms_form() -> None:
    prompt, other = (97, 98, 65), (99, 98)
    shown = Shown([prompt, other], n=2, prompt_logprobs=1)
    answers = [Answer(0), Answer(0), Answer(1), Answer(1)]
    answers[0].add(scored(prompt, (66, -0.75)))
    answers[1].add(delta("x"))
    answers[2].add(scored(other))
    body = CompletionShape(head(), TOKENS, shown).whole(answers)
    expected = [
        None,
        {
            "98": {"logprob": -1.0, "rank": 7, "decoded_token": "b"},
            "65": {"logprob": -0.25, "rank": 1, "decoded_token": "A"},
        },
        {"65": {"logprob": -2.0, "rank": 8, "decoded_token": "A"}},
    ]
    got = [choice["prompt_logprobs"] for choice in body["choices"]]
    assert got[0] == got[1] == expected
    assert list(got[0][1]) == ["98", "65"]
    assert got[2] == got[3] == [None, expected[1]]
    chat = ChatShape(head(), TOKENS, shown=Shown([prompt], prompt_logprobs=1)).whole(answers[:1])
    assert chat["prompt_logprobs"] == expected
    assert "prompt_logprobs" not in ChatShape(head(), TOKENS).whole(answers[:1])


# --- single tokens -----------------------------------------------------------------------------


def test_byte_level_tokens() -> None:
    assert b"".join(map(TOKENS.bytes_of, range(256))) == bytes(range(256))
    assert TOKENS.text_of(10) == "\n"
    assert (TOKENS.text_of(256), TOKENS.bytes_of(256)) == ("<|im_start|>", b"")
    assert (TOKENS.text_of(9999), TOKENS.bytes_of(9999)) == ("", b"")


def test_byte_fallback_tokens() -> None:
    vocab = {"<unk>": 0, "\u2581hi": 1, "<0xE4>": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokens = TokenText(tokenizer)
    assert (tokens.bytes_of(1), tokens.text_of(1)) == (b" hi", " hi")
    assert (tokens.bytes_of(2), tokens.text_of(2)) == (b"\xe4", "bytes:\\xe4")


# --- merging -----------------------------------------------------------------------------------


class Source:
    """A stream of deltas that notes how it ended."""

    def __init__(self, texts: str, error: Exception | None = None, *, endless: bool = False):
        self.texts, self.error, self.endless = texts, error, endless
        self.closed = False

    async def stream(self) -> AsyncIterator[Delta]:
        try:
            for text in self.texts:
                yield delta(text)
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            if self.endless:
                await asyncio.Event().wait()
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_merge_keeps_the_order_within_each_stream(count: int) -> None:
    sources = [Source("abc") for _ in range(count)]
    got: dict[int, str] = {}
    async for index, item in merge([source.stream() for source in sources]):
        got[index] = got.get(index, "") + item.text
    assert got == dict.fromkeys(range(count), "abc")
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_the_merge_closes_every_stream(count: int) -> None:
    sources = [Source("ab", endless=True) for _ in range(count)]
    merged = merge([source.stream() for source in sources])
    await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)


async def test_cancelling_the_reader_closes_every_stream() -> None:
    sources = [Source("a", endless=True) for _ in range(3)]

    async def read() -> list[Any]:
        return [item async for item in merge([source.stream() for source in sources])]

    task = asyncio.create_task(read())
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(source.closed for source in sources)


async def test_one_error_ends_all() -> None:
    sources = [Source("a", endless=True), Source("b", InternalError("boom"))]
    with pytest.raises(InternalError):
        async for _ in merge([source.stream() for source in sources]):
            pass
    assert all(source.closed for source in sources)
