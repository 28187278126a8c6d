"""A02: characters made of several tokens, with two kinds of tokenizers and random weights.

Scaled: 12 prompts of the case's 30, and every third length, unless HEADWATER_TEST_DEPTH is above 1.
A request holds all prompts, so that they share steps.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from caserig import COMPLETIONS
from depth import DEPTH
from rig import CHAT, Reply, ask

pytestmark = pytest.mark.torch
BROKEN = "\N{REPLACEMENT CHARACTER}"
PROMPTS = 12 if DEPTH == 1 else 30
LENGTHS = [1, 2, 3, *range(5, 41, 5)] if DEPTH == 1 else list(range(1, 41))


def prompts() -> list[str]:
    """Texts that end whole, in the middle of a word, and after characters of all sizes."""
    rng = random.Random("A02")
    letters = "abc de,.\n{}éü你好世界🌍🚀привет"
    return ["".join(rng.choices(letters, k=rng.randint(1, 30))) for _ in range(PROMPTS)]


def by_choice(reply: Reply) -> dict[int, list[str]]:
    """Pieces of text of each choice of a whole or streamed answer that came to its end."""
    assert reply.status == 200, reply.body
    bodies = [reply.json] if not reply.events else []
    if reply.events:
        assert reply.events[-1] == "[DONE]"
        bodies = [json.loads(data) for data in reply.events[:-1]]
    pieces: dict[int, list[str]] = {}
    ends: dict[int, int] = {}
    for choice in (choice for body in bodies for choice in body["choices"]):
        said = choice.get("message") or choice.get("delta") or {}
        pieces.setdefault(choice["index"], []).append(
            choice.get("text") or said.get("content") or ""
        )
        ends[choice["index"]] = ends.get(choice["index"], 0) + bool(choice["finish_reason"])
    assert set(ends.values()) == {1}
    return pieces


def asked(length: int, **more: Any) -> dict[str, Any]:
    """Greedy continuations of all prompts."""
    fixed = {"model": "fake", "temperature": 0, "max_tokens": length, "ignore_eos": True}
    return {"prompt": prompts(), **fixed, **more}


async def test_streams_say_what_whole_answers_say(spelling_worker) -> None:
    texts: list[list[str]] = []
    for length in LENGTHS:
        whole = by_choice(await ask(spelling_worker.url, COMPLETIONS, asked(length)))
        streamed = by_choice(
            await ask(spelling_worker.url, COMPLETIONS, asked(length, stream=True))
        )
        assert {n: "".join(p) for n, p in streamed.items()} == {n: p[0] for n, p in whole.items()}
        texts.append([whole[n][0] for n in range(PROMPTS)])
    for shorter, longer in pairwise(texts):
        for one, two in zip(shorter, longer, strict=True):
            assert two.startswith(one.rstrip(BROKEN))
    assert any(BROKEN in text for text in texts[-1]), "the weights break no character"


async def test_no_whole_character_is_shown_broken_first(spelling_worker) -> None:
    """A forced character of four bytes: nothing of it comes before it is whole."""
    url = spelling_worker.url
    for character in ("🚀", "世", "ß", "€"):
        answer = await ask(url, "/tokenize", {"prompt": f"a{character}", "model": "fake"})
        tokens = answer.json["tokens"]
        alone = (await ask(url, "/tokenize", {"prompt": "a", "model": "fake"})).json["tokens"]
        given = tokens[len(alone) :]
        decoded = await ask(url, "/detokenize", {"tokens": given, "model": "fake"})
        assert decoded.json["prompt"].strip() == character
        for cut in range(len(given)):
            bias = {str(given[cut]): 100}
            body = {"prompt": tokens[: len(alone) + cut], "logit_bias": bias, "max_tokens": 1}
            for stream in (False, True):
                sent = {"model": "fake", "temperature": 0, **body, "stream": stream}
                said = "".join(by_choice(await ask(url, COMPLETIONS, sent))[0])
                if cut == len(given) - 1 and cut == 0:
                    assert said.strip() == character
                elif cut == 0:
                    assert set(said) == {BROKEN}


async def test_chat_and_text_agree_with_log_probabilities(spelling_worker) -> None:
    """The bytes of the entries, joined, are the content, broken characters included."""
    for text in prompts()[:6]:
        messages = [{"role": "user", "content": text}]
        body = {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 30}
        body |= {"logprobs": True, "ignore_eos": True}
        whole = (await ask(spelling_worker.url, CHAT, body)).json["choices"][0]
        streamed = by_choice(await ask(spelling_worker.url, CHAT, {**body, "stream": True}))[0]
        content = whole["message"]["content"]
        assert "".join(streamed) == content
        data = bytes(b for entry in whole["logprobs"]["content"] for b in entry["bytes"])
        assert data.decode(errors="replace") == content
