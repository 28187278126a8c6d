"""A14: several choices in one answer, streamed and whole, with everything that goes per choice."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for, sdk
from rig import CHAT, RawClient

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
PATHS = [CHAT, COMPLETIONS]


def asked(path: str, n: int, **more: Any) -> dict[str, Any]:
    """A request for ``n`` choices that repeats."""
    fixed = {"model": "fake", "n": n, "temperature": 1, "seed": 21, "max_tokens": 20}
    return {**body_for(path, "three of them"), **fixed, **more}


@pytest.fixture(params=["worker", "gateway"])
async def client(request, fake_worker, module_gateway, dial) -> RawClient:
    """A connection to the worker or to a gateway in front of it."""
    gateways = module_gateway.gateways
    gateway = gateways[0] if gateways else module_gateway(fake_worker.url)
    made: RawClient = await dial(fake_worker.url if request.param == "worker" else gateway.url)
    return made


class Streamed:
    """A stream, checked for order while it is taken apart."""

    def __init__(self, events: list[str], path: str, n: int) -> None:
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"
        chunks = [json.loads(data) for data in events[:-1]]
        self.usage = chunks.pop()["usage"] if not chunks[-1]["choices"] else None
        self.texts = dict.fromkeys(range(n), "")
        self.ends: dict[int, str] = {}
        self.logprobs: dict[int, list[Any]] = {number: [] for number in range(n)}
        opened: set[int] = set()
        for chunk in chunks:
            assert "error" not in chunk
            for choice in chunk["choices"]:
                self._take(choice, path, opened)
        assert set(self.ends) == set(range(n))

    def _take(self, choice: dict[str, Any], path: str, opened: set[int]) -> None:
        number = choice["index"]
        assert number not in self.ends, "something after a finish reason"
        if path == CHAT:
            assert ("role" in choice["delta"]) == (number not in opened)
            opened.add(number)
            self.texts[number] += choice["delta"].get("content") or ""
        else:
            self.texts[number] += choice["text"]
        if choice["finish_reason"]:
            self.ends[number] = choice["finish_reason"]
        found = choice.get("logprobs")
        if found and path == CHAT:
            self.logprobs[number] += found["content"]
        elif found:
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            self.logprobs[number] += list(zip(*(found[name] for name in names), strict=True))


def whole_of(body: dict[str, Any], path: str) -> tuple[dict[int, str], dict[int, str], Any]:
    """(texts, ends, log-probabilities) of a whole answer."""
    texts, ends, logprobs = {}, {}, {}
    for choice in body["choices"]:
        number = choice["index"]
        texts[number] = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        ends[number] = choice["finish_reason"]
        found = choice["logprobs"]
        if not found:
            logprobs[number] = []
        elif path == CHAT:
            logprobs[number] = found["content"]
        else:
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            rows = zip(*(found[name] for name in names), strict=True)
            logprobs[number] = [tuple(row) for row in rows]
    return texts, ends, logprobs


async def both(
    client: RawClient, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], Streamed]:
    """The whole answer and the stream to one body, which must say the same."""
    whole = await client.ask("POST", path, json.dumps(body).encode())
    assert whole.status == 200, whole.body
    reply = await client.ask("POST", path, json.dumps({**body, **USAGE}).encode())
    assert reply.status == 200, reply.body
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    streamed = Streamed(reply.events, path, body["n"] * prompts)
    texts, ends, logprobs = whole_of(whole.json, path)
    assert streamed.texts == texts
    assert streamed.ends == ends
    assert streamed.logprobs == logprobs
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed.usage[name] == whole.json["usage"][name]
    return whole.json, streamed


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("logprobs", [None, 0, 3])
async def test_streams_equal_whole_answers(client, path, logprobs) -> None:
    for n, more in itertools.product(
        (1, 2, 3, 8),
        ({}, {"stop": ["e", "tt"]}, {"ignore_eos": True}, {"max_tokens": 1}, {"min_tokens": 9}),
    ):
        wished: dict[str, Any] = {}
        if logprobs is not None:
            wished = {"logprobs": logprobs}
            if path == CHAT:
                wished = {"logprobs": True, "top_logprobs": logprobs}
        body, streamed = await both(client, path, asked(path, n, **more, **wished))
        lengths = [len(streamed.texts[number]) for number in range(n)]
        if logprobs is not None:
            # One entry for each token, an end token included.
            entries = sum(map(len, streamed.logprobs.values()))
            assert entries == body["usage"]["completion_tokens"]
        if more == {"ignore_eos": True}:
            assert lengths == [20] * n
            assert body["usage"]["completion_tokens"] == 20 * n


@pytest.mark.parametrize("path", PATHS)
async def test_the_prompt_counts_once(client, path) -> None:
    one, _ = await both(client, path, asked(path, 1))
    for n in (2, 5):
        many, _ = await both(client, path, asked(path, n))
        assert many["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
        assert many["choices"][0] == one["choices"][0]


@pytest.mark.parametrize("path", PATHS)
async def test_seeds_and_no_seeds(client, path) -> None:
    """Seeded choices differ among themselves and repeat; greedy ones are all the same."""
    first, _ = await both(client, path, asked(path, 4, ignore_eos=True))
    texts = set(whole_of(first, path)[0].values())
    assert len(texts) == 4
    other, _ = await both(client, path, asked(path, 4, ignore_eos=True, seed=-(2**63)))
    assert not texts & set(whole_of(other, path)[0].values())
    last, _ = await both(client, path, asked(path, 4, ignore_eos=True, seed=2**63 - 1))
    assert len(set(whole_of(last, path)[0].values())) == 4
    greedy, _ = await both(client, path, asked(path, 4, temperature=0))
    assert len(set(whole_of(greedy, path)[0].values())) == 1


async def test_choices_that_end_at_once(client) -> None:
    for path in PATHS:
        body, streamed = await both(client, path, asked(path, 3, logit_bias={"257": 100}))
        assert set(streamed.texts.values()) == {""}
        assert set(streamed.ends.values()) == {"stop"}
        assert body["usage"]["completion_tokens"] == 3


async def test_several_prompts_with_several_choices(client) -> None:
    prompts = ["first", "the second one", [116, 104]]
    for chosen in (prompts[:1], prompts[:2], [[1, 2], [116, 104]]):
        body = {**asked(COMPLETIONS, 3, ignore_eos=True), "prompt": chosen, "echo": True}
        whole, _ = await both(client, COMPLETIONS, body)
        assert [c["index"] for c in whole["choices"]] == list(range(3 * len(chosen)))
        assert whole["usage"]["prompt_tokens"] == sum(map(len, chosen))
        alone, _ = await both(client, COMPLETIONS, {**body, "prompt": chosen[:1]})
        assert alone["choices"] == whole["choices"][:3]


async def test_the_most_and_one_too_many(client) -> None:
    body = asked(CHAT, 128, max_tokens=2)
    whole, _ = await both(client, CHAT, body)
    assert len(whole["choices"]) == 128
    for n in (129, 0, -1):
        reply = await client.ask("POST", CHAT, json.dumps(asked(CHAT, n)).encode())
        assert reply.status == 400
        assert reply.json["error"]["param"] == "n"


async def test_the_case_with_the_real_client(fake_worker) -> None:
    body: Any = {"model": "fake", "messages": [{"role": "user", "content": "x"}], **USAGE}
    body |= {"n": 3, "logprobs": True, "temperature": 1, "max_tokens": 20}
    async with sdk(fake_worker.url) as client:
        stream = await client.chat.completions.create(**body)
        chunks = [chunk async for chunk in stream]
    ends = [(c.index, c.finish_reason) for k in chunks for c in k.choices if c.finish_reason]
    assert sorted(index for index, _ in ends) == [0, 1, 2]
    assert chunks[-1].usage.completion_tokens == sum(
        len(c.logprobs.content) for k in chunks for c in k.choices if c.logprobs
    )
