"""What vLLM's clients ask beyond OpenAI's fields: which tokens may be chosen, and what is shown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from workerrig import CHAT, COMPLETIONS, Client, Stream, chat, completion

FORMS = [(CHAT, chat), (COMPLETIONS, completion)]


@pytest.fixture
async def client(fake_worker: Any) -> AsyncIterator[Client]:
    """A client of a worker without torch."""
    async with Client(fake_worker.url) as made:
        yield made


def text_of(choice: dict[str, Any]) -> str:
    """Of either route."""
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def both(client: Client, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], Stream]:
    """The only choice, whole, and a stream that says the same."""
    choice: dict[str, Any] = (await client.ask(path, body))["choices"][0]
    stream = await client.stream(path, body)
    assert stream.text() == text_of(choice)
    assert stream.finishes() == [choice["finish_reason"]]
    return choice, stream


@pytest.mark.parametrize(("path", "make"), FORMS)
async def test_the_stop_string_is_part_of_the_text_if_wanted(
    client: Client, path: str, make: Any
) -> None:
    body = make("with its stop", max_tokens=40, ignore_eos=True)
    text = text_of((await client.ask(path, body))["choices"][0])
    for place in range(0, 30, 7):
        stop = text[place : place + 3]
        stopped = {**body, "stop": [stop], "include_stop_str_in_output": True}
        choice, _ = await both(client, path, stopped)
        assert text_of(choice) == text[: text.index(stop) + 3]
        assert choice["finish_reason"] == "stop"
    ended = make("x", stop_token_ids=[101], logit_bias={"101": 100}, max_tokens=4)
    assert text_of((await both(client, path, ended))[0]) == ""
    shown = {**ended, "include_stop_str_in_output": True}
    assert text_of((await both(client, path, shown))[0]) == "e"


@pytest.mark.parametrize(("path", "make"), FORMS)
async def test_special_tokens_are_shown_if_wanted(client: Client, path: str, make: Any) -> None:
    body = make("special", max_tokens=2, logit_bias={"256": 100}, skip_special_tokens=False)
    choice, _ = await both(client, path, body)
    assert text_of(choice) == "<|im_start|>" * 2
    assert text_of((await both(client, path, {**body, "skip_special_tokens": True}))[0]) == ""
    ended = make("special", max_tokens=2, logit_bias={"257": 100}, skip_special_tokens=False)
    assert text_of((await both(client, path, ended))[0]) == ""
    ended["include_stop_str_in_output"] = True
    assert text_of((await both(client, path, ended))[0]) == "<|im_end|>"


async def test_bytes_and_offsets_count_shown_special_tokens(client: Client) -> None:
    more = {"max_tokens": 2, "logit_bias": {"256": 100}, "skip_special_tokens": False}
    choice, _ = await both(client, CHAT, chat("x", logprobs=True, **more))
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text_of(choice)
    choice, _ = await both(client, COMPLETIONS, completion("x", logprobs=1, **more))
    assert choice["logprobs"]["text_offset"] == [0, 12]


@pytest.mark.parametrize(("path", "make"), FORMS)
async def test_only_allowed_tokens(client: Client, path: str, make: Any) -> None:
    body = make("few", max_tokens=30, allowed_token_ids=[97, 122], temperature=1, seed=3)
    choice, _ = await both(client, path, body)
    assert set(text_of(choice)) <= set("az")
    assert len(text_of(choice)) == 30
    ends = make("few", max_tokens=5, min_tokens=2, allowed_token_ids=[257])
    assert (await both(client, path, ends))[0]["finish_reason"] == "stop"


@pytest.mark.parametrize(("path", "make"), FORMS)
async def test_bad_words_never_become_complete(client: Client, path: str, make: Any) -> None:
    body = make("bad", max_tokens=60, ignore_eos=True)
    text = text_of((await client.ask(path, body))["choices"][0])
    words = [text[5:7], text[20:23], "e"]
    choice, _ = await both(client, path, {**body, "bad_words": words})
    said = text_of(choice)
    assert len(said) == 60
    assert not any(word in said for word in words)


@pytest.mark.parametrize(("path", "make"), FORMS)
async def test_token_ids_beside_the_text(client: Client, path: str, make: Any) -> None:
    body = make("ids", max_tokens=9, min_tokens=4, logit_bias={"257": 100}, return_token_ids=True)
    whole = await client.ask(path, body)
    (choice,) = whole["choices"]
    assert choice["token_ids"] == [*text_of(choice).encode(), 257]
    prompt = whole["prompt_token_ids"] if path == CHAT else choice["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    assert bytes(token for token in prompt if token < 256).decode().find("ids") >= 0
    stream = await client.stream(path, body)
    given = [token for part in stream.choices() for token in part.get("token_ids", [])]
    assert given == choice["token_ids"]
    first = stream.chunks[0] if path == CHAT else stream.choices()[0]
    assert first["prompt_token_ids"] == prompt
    rest = stream.chunks[1:] if path == CHAT else stream.choices()[1:]
    assert not any("prompt_token_ids" in part for part in rest)
    plain = (await client.ask(path, {**body, "return_token_ids": False}))["choices"][0]
    assert "token_ids" not in plain


async def test_tokens_named_by_their_ids(client: Client) -> None:
    more = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    choice, _ = await both(client, CHAT, chat("x", logprobs=True, top_logprobs=2, **more))
    for entry in choice["logprobs"]["content"]:
        assert entry["token"] == f"token_id:{entry['bytes'][0]}"
        assert all(top["token"].startswith("token_id:") for top in entry["top_logprobs"])
    body = completion("x", logprobs=2, echo=True, **more)
    logprobs = (await both(client, COMPLETIONS, body))[0]["logprobs"]
    assert logprobs["tokens"][0] == "token_id:120"
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"][1:] for name in top)


@pytest.mark.parametrize(("path", "make"), FORMS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [300]),
        ("allowed_token_ids", "x"),
        ("bad_words", [""]),
        ("bad_words", [3]),
        ("bad_words", ["x"] * 65),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", "no"),
        ("return_token_ids", 1),
        ("return_tokens_as_token_ids", "yes"),
        ("truncate_prompt_tokens", 5),
        ("chat_template", "{{ x }}"),
        ("best_of", 2),
    ],
)
async def test_wrong_values_name_their_field(
    client: Client, path: str, make: Any, field: str, value: Any
) -> None:
    answer = await client.post(path, make("x", **{field: value}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)


async def test_a_form_is_not_combined_with_other_choices(client: Client) -> None:
    for field in ({"allowed_token_ids": [97]}, {"bad_words": ["x"]}):
        body = chat("x", response_format={"type": "json_object"}, **field)
        answer = await client.post(CHAT, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(field))
