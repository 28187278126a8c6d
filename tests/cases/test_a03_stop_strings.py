"""A03: stop strings across tokens, at every position and length, streamed and not, on both routes.

Scaled: every position and length on the worker without torch; with real tokenizers every 7th, all
of them with HEADWATER_TEST_DEPTH above 1.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for
from depth import DEPTH
from rig import CHAT, RawClient, Reply

BROKEN = "\N{REPLACEMENT CHARACTER}"
AT_ONCE = 8


def asked(path: str, **more: Any) -> dict[str, Any]:
    """A greedy request that only a stop string or its limit ends."""
    fixed = {"model": "fake", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    return {**body_for(path, "tell me about the sea"), **fixed, **more}


def told(reply: Reply) -> tuple[str, str]:
    """(text, finish reason)."""
    assert reply.status == 200, reply.body
    bodies = [json.loads(data) for data in reply.events if data != "[DONE]"] or [reply.json]
    texts, ends = [], []
    for choice in (choice for body in bodies for choice in body["choices"]):
        said = choice.get("message") or choice.get("delta") or {}
        texts.append(choice.get("text") or said.get("content") or "")
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(ends) == 1
    return "".join(texts), ends[0]


def cut(text: str, stops: list[str]) -> tuple[str, str]:
    """What is right: the text up to the stop string that is complete first."""
    ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    return (text[: min(ends)[1]], "stop") if ends else (text, "length")


async def check_all(
    url: str, jobs: list[tuple[str, list[str] | str]], text: dict[str, str]
) -> None:
    """Each (route, stop) whole and streamed."""
    waiting = [(path, stop, stream) for path, stop in jobs for stream in (False, True)]

    async def work() -> None:
        client = await RawClient.connect(url)
        while waiting:
            path, stop, stream = waiting.pop()
            sent = asked(path, stop=stop, stream=stream)
            got = told(await client.ask("POST", path, json.dumps(sent).encode()))
            right = cut(text[path], [stop] if isinstance(stop, str) else stop)
            assert got == right, (path, stop, stream)
        client.close()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def free_texts(url: str) -> dict[str, str]:
    """The answers without stop strings, by route."""
    texts = {}
    for path in (CHAT, COMPLETIONS):
        client = await RawClient.connect(url)
        reply = await client.ask("POST", path, json.dumps(asked(path)).encode())
        client.close()
        texts[path], end = told(reply)
        assert end == "length"
    return texts


def stops_of(text: str, step: int) -> list[str]:
    """Every ``step``-th of the pieces of 1 to 6 characters, none with a broken character."""
    pieces = [text[p : p + n] for p in range(min(80, len(text))) for n in range(1, 7)]
    return [piece for piece in pieces[::step] if piece and BROKEN not in piece]


async def test_every_position_and_length(fake_worker) -> None:
    texts = await free_texts(fake_worker.url)
    step = 1 if DEPTH > 1 else 2
    jobs = [(path, stop) for path, text in texts.items() for stop in stops_of(text, step)]
    assert len(jobs) > 300
    await check_all(fake_worker.url, jobs, texts)


async def test_several_stop_strings(fake_worker) -> None:
    """Overlapping, nested, beginning alike, absent ones; the first to be complete ends the text."""
    texts = await free_texts(fake_worker.url)
    rng = random.Random("A03")
    jobs: list[tuple[str, list[str] | str]] = []
    for path, text in texts.items():
        for _ in range(30):
            at = rng.randrange(5, len(text) - 8)
            pieces = [text[at - rng.randint(0, 4) : at + rng.randint(1, 8)] for _ in range(3)]
            almost = [piece[:-1] + "\u2603" for piece in pieces if len(piece) > 1]
            jobs.append((path, rng.sample(pieces + almost, k=rng.randint(1, 4))))
        jobs += [(path, text), (path, text[-3:]), (path, text + "x"), (path, [text[:1]])]
    await check_all(fake_worker.url, jobs, texts)


@pytest.mark.torch
async def test_with_real_tokenizers(spelling_worker) -> None:
    texts = await free_texts(spelling_worker.url)
    step = 1 if DEPTH > 1 else 7
    jobs = [(path, stop) for path, text in texts.items() for stop in stops_of(text, step)]
    assert len(jobs) > 20
    await check_all(spelling_worker.url, jobs, texts)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stop_strings_and_many_choices(fake_worker, dial, path) -> None:
    """With ``n``, seeds and log-probabilities each choice is cut for itself."""
    client = await dial(fake_worker.url)
    more = {"n": 4, "seed": 11, "temperature": 1, "logprobs": True if path == CHAT else 2}
    free = (await client.ask("POST", path, json.dumps(asked(path, **more)).encode())).json
    texts = [c.get("text") or c["message"]["content"] for c in free["choices"]]
    for stop in (texts[0][10:13], texts[3][20:22], " "):
        sent = asked(path, **more, stop=[stop])
        whole = (await client.ask("POST", path, json.dumps(sent).encode())).json
        reply = await client.ask("POST", path, json.dumps({**sent, "stream": True}).encode())
        streamed = dict.fromkeys(range(4), "")
        for data in reply.events[:-1]:
            for choice in json.loads(data)["choices"]:
                said = choice.get("delta") or {}
                streamed[choice["index"]] += choice.get("text") or said.get("content") or ""
        for number, choice in enumerate(whole["choices"]):
            text = choice.get("text") if path == COMPLETIONS else choice["message"]["content"]
            assert (text, choice["finish_reason"]) == cut(texts[number], [stop])
            assert streamed[number] == text
