"""A real worker process answers as OpenAI would: whole, streamed, several choices, usage."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import openai
import pytest

from tests.workerrig import CHAT, COMPLETIONS, Client, chat, completion

FORMS = [(CHAT, chat), (COMPLETIONS, completion)]
LONG = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture
async def client(fake_worker: Any) -> AsyncIterator[Client]:
    async with Client(fake_worker.url) as made:
        yield made


async def test_chat_shape(client: Client) -> None:
    body = await client.ask(CHAT, chat("hello there", max_tokens=5))
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 5
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5


async def test_completion_shape(client: Client) -> None:
    body = await client.ask(COMPLETIONS, completion("once upon", ignore_eos=True))
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert len(choice["text"]) == 16
    assert body["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize(("path", "make"), FORMS)
@pytest.mark.parametrize("limit", [1, 2, 7, 40, 150])
async def test_stream_equals_whole(client: Client, path: str, make: Any, limit: int) -> None:
    request = make(f"{LONG} {limit}", max_tokens=limit)
    whole = await client.ask(path, request)
    stream = await client.stream(path, request)
    (choice,) = whole["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert stream.text() == text
    assert stream.finishes() == [choice["finish_reason"]]
    assert stream.done == 1
    assert stream.usages == []
    assert all(chunk["choices"] for chunk in stream.chunks)
    assert len({chunk["id"] for chunk in stream.chunks}) == 1
    if path == CHAT:
        first, *others = [choice["delta"] for choice in stream.choices()]
        assert first == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in others)


@pytest.mark.parametrize(("path", "make"), FORMS)
async def test_usage_chunk(client: Client, path: str, make: Any) -> None:
    request = make("count me", max_tokens=9)
    whole = await client.ask(path, request)
    stream = await client.stream(path, {**request, "stream_options": {"include_usage": True}})
    assert stream.chunks[-1]["choices"] == []
    assert [chunk["usage"] for chunk in stream.chunks[:-1]] == [None] * (len(stream.chunks) - 1)
    (usage,) = stream.usages
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name]
    for options in (None, {"include_usage": False}, {}):
        plain = await client.stream(path, {**request, "stream_options": options})
        assert plain.usages == []
        assert all("usage" not in chunk for chunk in plain.chunks)


@pytest.mark.parametrize(("path", "make"), FORMS)
async def test_cached_tokens_are_always_reported(client: Client, path: str, make: Any) -> None:
    request = make("cold then warm: " + LONG + path, max_tokens=2)
    cold = await client.ask(path, request)
    warm = await client.ask(path, request)
    assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    prompt = cold["usage"]["prompt_tokens"]
    expected = (prompt - 1) // 16 * 16
    assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": expected}
    salted = await client.ask(path, {**request, "cache_salt": "other"})
    assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_several_choices_in_one_stream(client: Client) -> None:
    request = chat(
        "three of them",
        n=3,
        logprobs=True,
        temperature=1,
        max_tokens=20,
        stream_options={"include_usage": True},
    )
    stream = await client.stream(CHAT, request)
    assert stream.done == 1
    for index in range(3):
        choices = stream.choices(index)
        assert choices[0]["delta"]["role"] == "assistant"
        assert sum("role" in choice["delta"] for choice in choices) == 1
        assert len(stream.finishes(index)) == 1
        assert choices[-1]["finish_reason"] is not None
        tokens = [e for c in choices for e in (c["logprobs"] or {"content": []})["content"]]
        assert bytes(b for token in tokens for b in token["bytes"]).decode() == stream.text(index)
    assert stream.choices(3) == []
    (usage,) = stream.usages
    single = await client.ask(CHAT, chat("three of them", max_tokens=1))
    assert usage["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert 3 <= usage["completion_tokens"] <= 60


async def test_several_prompts_and_choices(client: Client) -> None:
    prompts = ["first one", "the second prompt"]
    body = await client.ask(COMPLETIONS, completion(prompts, n=2, max_tokens=4, ignore_eos=True))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    singles = [
        (await client.ask(COMPLETIONS, completion(text, max_tokens=4, ignore_eos=True)))["choices"]
        for text in prompts
    ]
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [singles[0][0]["text"]] * 2 + [singles[1][0]["text"]] * 2
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == 16


async def test_seeded_choices_differ_and_repeat(client: Client) -> None:
    request = completion("dice", n=3, seed=7, temperature=1, max_tokens=24, ignore_eos=True)
    first, second = [await client.ask(COMPLETIONS, request) for _ in range(2)]
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in second["choices"]]


async def test_token_id_prompts(client: Client) -> None:
    text = "as ids"
    by_text = await client.ask(COMPLETIONS, completion(text, max_tokens=6))
    for prompt in (list(text.encode()), [list(text.encode())], [text]):
        by_ids = await client.ask(COMPLETIONS, completion(prompt, max_tokens=6))
        assert by_ids["choices"] == by_text["choices"]
        assert by_ids["usage"]["prompt_tokens"] == len(text)


async def test_echo(client: Client) -> None:
    plain = await client.ask(COMPLETIONS, completion("mirror", max_tokens=6))
    request = completion("mirror", max_tokens=6, echo=True)
    whole = await client.ask(COMPLETIONS, request)
    assert whole["choices"][0]["text"] == "mirror" + plain["choices"][0]["text"]
    assert (await client.stream(COMPLETIONS, request)).text() == whole["choices"][0]["text"]


@pytest.mark.parametrize(("path", "make"), FORMS)
async def test_stop_strings_are_not_sent(client: Client, path: str, make: Any) -> None:
    request = make("until the stop", max_tokens=60, ignore_eos=True)
    text = (await client.stream(path, request)).text()
    for place in range(0, 40, 3):
        stop = text[place : place + 3]
        stream = await client.stream(path, {**request, "stop": [stop]})
        assert stream.text() == text[: text.index(stop)]
        assert stream.finishes() == ["stop"]


async def test_end_token_is_an_entry_without_bytes(client: Client) -> None:
    request = chat("end", logit_bias={"257": 100}, logprobs=True, max_tokens=9)
    body = await client.ask(CHAT, request)
    (choice,) = body["choices"]
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 1
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("<|im_end|>", [])
    stream = await client.stream(CHAT, request)
    assert stream.finishes() == ["stop"]
    assert stream.text() == ""


async def test_completion_logprobs(client: Client) -> None:
    request = completion("log", logprobs=2, max_tokens=8, ignore_eos=True)
    whole = await client.ask(COMPLETIONS, request)
    logprobs = whole["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["choices"][0]["text"]
    assert logprobs["text_offset"] == list(range(8))
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 8
    stream = await client.stream(COMPLETIONS, request)
    for name, values in logprobs.items():
        joined = [v for c in stream.choices() if c["logprobs"] for v in c["logprobs"][name]]
        assert joined == values


@pytest.mark.parametrize(("path", "make"), FORMS)
async def test_nulls_are_absent(client: Client, path: str, make: Any) -> None:
    names = (
        "max_completion_tokens top_p n stop seed logprobs top_logprobs stream stream_options tools "
        "user logit_bias"
    ).split()
    plain = await client.ask(path, make("nulls", max_tokens=12))
    nulls = await client.ask(path, make("nulls", max_tokens=12, **dict.fromkeys(names)))
    assert nulls["choices"] == plain["choices"]


async def test_limits_end_with_length(client: Client) -> None:
    for fields in (
        {"max_completion_tokens": 5},
        {"max_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": 5},
    ):
        request = chat("limits", ignore_eos=True, **fields)
        whole = await client.ask(CHAT, request)
        assert whole["usage"]["completion_tokens"] == 5
        assert whole["choices"][0]["finish_reason"] == "length"
        assert (await client.stream(CHAT, request)).finishes() == ["length"]


async def test_content_parts_are_joined_text(client: Client) -> None:
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    async def ask(content: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return await client.ask(CHAT, {**chat(""), "messages": messages, "max_tokens": 12})

    plain, listed = await ask("ab cd"), await ask(parts("ab cd"))
    assert listed["choices"] == plain["choices"]
    assert listed["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    both, beta = await ask(parts("alpha", "beta")), await ask("beta")
    assert both["usage"]["prompt_tokens"] > beta["usage"]["prompt_tokens"]
    assert both["choices"] != beta["choices"]


@pytest.mark.parametrize("content", ["missing", None, [], ""])
async def test_messages_without_content(client: Client, content: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for calls in ([call], []):
        assistant: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
        if content != "missing":
            assistant["content"] = content
        messages = [{"role": "user", "content": "A"}, assistant, {"role": "user", "content": "B"}]
        body = {**chat(""), "messages": messages, "max_tokens": 2}
        answer = await client.post(CHAT, body)
        assert answer.status_code == 200, answer.text


async def test_the_official_client(fake_worker: Any) -> None:
    async with openai.AsyncOpenAI(
        base_url=fake_worker.url + "/v1", api_key="none", max_retries=0
    ) as sdk:
        assert [model.id async for model in sdk.models.list()] == ["fake"]
        whole = await sdk.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "sdk"}], temperature=0, max_tokens=9
        )
        stream = await sdk.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "sdk"}],
            temperature=0,
            max_tokens=9,
            stream=True,
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError):
            await sdk.completions.create(model="nobody", prompt="x")


@pytest.mark.parametrize("byte", [0x41, 0xC3, 0x8C, 0xF0])
async def test_broken_characters_stream_as_they_are_whole(client: Client, byte: int) -> None:
    # The forced byte completes a character, begins one that never ends, or belongs to none.
    for prompt in ("text", [0x61, 0xC3], [0xF0, 0x9F]):
        texts = []
        for limit in range(1, 7):
            bias = {str(byte): 100}
            request = completion(prompt, max_tokens=limit, ignore_eos=True, logit_bias=bias)
            stream = await client.stream(COMPLETIONS, request)
            whole = await client.ask(COMPLETIONS, request)
            assert stream.text() == whole["choices"][0]["text"]
            assert (stream.finishes(), stream.done) == (["length"], 1)
            texts.append(stream.text())
        for shorter, longer in pairwise(texts):
            assert longer.startswith(shorter.rstrip("\ufffd"))


async def test_a_stream_can_be_read_by_lines_of_text(client: Client) -> None:
    """Clients that take Unicode's line ends for ends of lines would find half an event."""
    text = "a\x85b\u2028c\u2029d"
    answer = await client.post(COMPLETIONS, completion(text, echo=True, max_tokens=2, stream=True))
    lines = [line for line in answer.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(text)
