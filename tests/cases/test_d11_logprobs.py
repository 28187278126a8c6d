"""D11: log-probabilities of prompts and answers, whatever was cached, cut, preempted or streamed.

The runs with steps of 7, 16 and 100 tokens are compared within 1e-4 with one of an engine without a
cache that takes the prompt in one step. A cached prefix is not read for such a prompt, so
``cached_tokens`` is 0 then.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from casemodel import TorchReference, TorchRig, close, merging_model
from conftest import WorkerLauncher, WorkerProcess
from enginerig import Answer, greedy, prompt
from workerrig import CHAT, COMPLETIONS, Client, chat, completion

from worker.sequence import TokenLogprob

pytestmark = pytest.mark.torch
LENGTH, NEW, TOP = 100, 3, 3
PARAMS = greedy(NEW, logprobs=TOP, prompt_logprobs=TOP, ignore_eos=True)
CHUNKS = [7, 16, 100]


@pytest.fixture(scope="module")
def reference() -> TorchReference:
    """Cold, all of the prompt in one step; float64."""
    return TorchReference()


def scores_of(answer: Answer) -> tuple[TokenLogprob, ...]:
    """Of the prompt."""
    assert answer.deltas[0].prompt_logprobs is not None
    return answer.deltas[0].prompt_logprobs


def check(answer: Answer, right: Answer) -> None:
    """All entries, of the prompt and of the answer."""
    ours, theirs = scores_of(answer), scores_of(right)
    assert len(ours) == len(theirs) == right.last.prompt_tokens - 1
    for one, two in zip(ours, theirs, strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
        assert one.rank == two.rank
        assert [token for token, _ in one.top] == [token for token, _ in two.top]
        assert [v for _, v in one.top] == pytest.approx([v for _, v in two.top], abs=1e-4)
    assert answer.tokens == right.tokens
    assert close(answer, right)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_cold_and_warm_in_the_engine(reference: TorchReference, chunk: int) -> None:
    tokens = prompt(random.Random("D11"), LENGTH)
    rig = TorchRig(budget=chunk)
    for _ in range(3):
        answer = rig.answer(tokens, PARAMS)
        check(answer, reference.answer(tokens, PARAMS))
        assert answer.last.cached_tokens == 0
    # what such a request computed is reused by others, in part or as a whole
    assert rig.answer(tokens, greedy(3)).last.cached_tokens == 96
    longer = tokens[:50] + prompt(random.Random("D11 more"), 30)
    check(rig.answer(longer, PARAMS), reference.answer(longer, PARAMS))
    rig.check_idle()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_preempted_and_beside_others(reference: TorchReference, chunk: int) -> None:
    """Twelve decoders on a small pool, some with log-probabilities of their prompts."""
    rng = random.Random(chunk)
    rig = TorchRig(n_blocks=50, block_size=4, budget=chunk)
    jobs = {}
    for turn in range(12):
        scored = greedy(40, logprobs=TOP, prompt_logprobs=TOP, ignore_eos=True)
        job = (
            prompt(rng, LENGTH if turn == 5 else rng.randint(5, 40)),
            (scored if turn % 2 else greedy(40, logprobs=TOP, ignore_eos=True)),
        )
        jobs[rig.submit(*job)] = job
        rig.step(3)
    rig.run()
    assert rig.loop.stats.preemptions > 3
    for request_id, (tokens, params) in jobs.items():
        answer, right = rig.answers[request_id], reference.answer(tokens, params)
        if params.prompt_logprobs is None:
            assert close(answer, right)
        else:
            check(answer, right)
    rig.check_idle()


# --- over HTTP -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    """One model, whose tokens are parts of words and of characters: in steps of 7 tokens, and
    without a cache."""
    folder = tmp_path_factory.mktemp("d11")
    model = str(merging_model(folder / "merging"))
    launcher = WorkerLauncher(folder)
    common = ("--model", model, "--served-model-name", "fake", "--threads", "1")
    try:
        launcher(*common, "--kv-blocks", "128", "--max-batch-tokens", "7")
        flags = ("--kv-blocks", "128", "--max-batch-tokens", "2048", "--no-prefix-cache")
        launcher(*common, *flags)
        yield launcher.workers
    finally:
        launcher.end()


TEXT = (
    "über größe naïve café 你好 世界 привет мир 🌍 the quick brown fox jumps over 12 + 34 = xyz&Q? "
    * 4
)


async def hundred_tokens(client: Client) -> list[int]:
    """The beginning of the text."""
    body = await client.ask("/tokenize", {"model": "fake", "prompt": TEXT})
    tokens: list[int] = body["tokens"][:LENGTH]
    # a special one in the middle is written out by the echo of token ids
    tokens[50] = 3
    assert len(tokens) == LENGTH
    return tokens


def near(ours: Any, theirs: Any) -> bool:
    """Equal but for numbers that differ by at most 1e-4."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) <= 1e-4
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(near(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(near, ours, theirs))
    return bool(ours == theirs)


def joined(choices: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The ``logprobs`` of a streamed completion, put together."""
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


async def test_echoed_prompts_over_http(workers: list[WorkerProcess]) -> None:
    async with Client(workers[-1].url) as cold:
        tokens = await hundred_tokens(cold)
        body = completion(tokens, echo=True, logprobs=TOP, max_tokens=NEW, ignore_eos=True)
        right = (await cold.ask(COMPLETIONS, body))["choices"][0]
    logprobs = right["logprobs"]
    assert {len(column) for column in logprobs.values()} == {LENGTH + NEW}
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    assert all(TOP <= len(top) <= TOP + 1 for top in logprobs["top_logprobs"][1:])
    starts = logprobs["text_offset"]
    assert starts == sorted(starts)
    for start, name in zip(starts, logprobs["tokens"], strict=True):
        if not name.startswith("bytes:"):
            assert right["text"].startswith("" if name == "<s>" else name, start)
    async with Client(workers[0].url) as client:
        await client.ask(COMPLETIONS, completion(tokens[:60]))
        for _ in range(2):
            whole = await client.ask(COMPLETIONS, body)
            assert near(whole["choices"][0], right)
            assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        stream = await client.stream(COMPLETIONS, body)
        assert near(joined(stream.choices()), logprobs)
        assert stream.text() == right["text"]


async def test_vllms_prompt_logprobs_over_http(workers: list[WorkerProcess]) -> None:
    """The same numbers as an echo shows, on both routes, for each of several choices."""
    async with Client(workers[0].url) as client:
        tokens = await hundred_tokens(client)
        more = {"prompt_logprobs": 2, "n": 3, "max_tokens": 2, "temperature": 1, "seed": 5}
        both = {"echo": True, "logprobs": 4}
        body = await client.ask(COMPLETIONS, completion([tokens, tokens[:1]], **more, **both))
        assert len(body["choices"]) == 6
        for choice in body["choices"]:
            length = LENGTH if choice["index"] < 3 else 1
            shown = choice["prompt_logprobs"]
            assert len(shown) == length
            assert shown[0] is None
            assert len(choice["logprobs"]["tokens"]) == length + 2
            for place in range(1, length):
                own, *others = shown[place].values()
                assert str(tokens[place]) in shown[place]
                assert own["logprob"] == choice["logprobs"]["token_logprobs"][place]
                assert own["decoded_token"] == choice["logprobs"]["tokens"][place]
                ranks = [entry["rank"] for entry in (own, *others)]
                assert sorted(ranks)[:2] == [1, 2]
        assert body["usage"]["prompt_tokens"] == LENGTH + 1
        question = chat("who is there? 🌍", prompt_logprobs=1, max_tokens=4)
        answer = await client.ask(CHAT, question)
        rendered = await client.ask("/tokenize", {**question, "prompt_logprobs": None})
        assert len(answer["prompt_logprobs"]) == rendered["count"]
        assert answer["prompt_logprobs"][0] is None
        for token, entry in zip(rendered["tokens"][1:], answer["prompt_logprobs"][1:], strict=True):
            assert next(iter(entry)) == str(token)
        again = await client.ask(CHAT, question)
        assert near(again["prompt_logprobs"], answer["prompt_logprobs"])
        refused = await client.post(CHAT, {**question, "stream": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_logprobs"


def entries_of(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat log-probabilities of one choice, streamed or not."""
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    return [entry for part in parts for entry in part["content"]]


def shown_bytes(entries: list[dict[str, Any]]) -> bytes:
    """What the answer's tokens add up to."""
    return b"".join(bytes(entry["bytes"]) for entry in entries)


@pytest.mark.parametrize("seed", range(6))
async def test_chat_entries_add_up_to_the_answer(workers: list[WorkerProcess], seed: int) -> None:
    """Characters here are cut into tokens; with a stop string the entries go on to its end."""
    base = chat(
        f"{seed} says 世界 🌍",
        logprobs=True,
        top_logprobs=5,
        max_tokens=60,
        temperature=1.5,
        seed=seed,
    )
    async with Client(workers[0].url) as client:
        body = await client.ask(CHAT, base)
        (choice,) = body["choices"]
        entries = choice["logprobs"]["content"]
        content = choice["message"]["content"]
        assert len(entries) == body["usage"]["completion_tokens"]
        assert all(len(entry["top_logprobs"]) == 5 for entry in entries)
        assert shown_bytes(entries).decode(errors="replace") == content
        assert any(entry["token"].startswith("bytes:") for entry in entries)
        warm = await client.ask(CHAT, base)
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert near(warm["choices"], body["choices"])
        stream = await client.stream(CHAT, base)
        assert near(entries_of(stream.choices()), entries)
        assert stream.text() == content
        stop = next(
            content[at : at + 2] for at in range(5, 50) if "\ufffd" not in content[at : at + 2]
        )
        stopped = {**base, "stop": [stop], "stream_options": {"include_usage": True}}
        whole = await client.ask(CHAT, {**stopped, "stream_options": None})
        cut = content[: content.index(stop)]
        assert whole["choices"][0]["message"]["content"] == cut
        kept = whole["choices"][0]["logprobs"]["content"]
        assert len(kept) == whole["usage"]["completion_tokens"]
        assert near(kept, entries[: len(kept)])
        assert shown_bytes(kept).decode(errors="replace").startswith(cut + stop)
        stream = await client.stream(CHAT, stopped)
        assert stream.text() == cut
        assert near(entries_of(stream.choices()), kept)
        assert stream.usages[0]["completion_tokens"] == len(kept)


def test_the_comparison_can_fail() -> None:
    """A difference beyond 1e-4 anywhere is seen."""
    assert near({"a": [1.0, None]}, {"a": [1.00009, None]})
    assert not near({"a": [1.0, None]}, {"a": [1.0002, None]})
    assert not near([1.0], [1.0, 2.0])
    assert not near([None], [0.0])
