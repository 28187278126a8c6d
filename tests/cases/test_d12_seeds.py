"""D12: what a seeded request says depends on nothing but itself."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from casemodel import TorchRig
from enginerig import prompt
from workerrig import COMPLETIONS, Client, completion

from worker.sequence import SamplingParams

pytestmark = pytest.mark.torch
TOKENS = prompt(random.Random("D12"), 70)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
}


def seeded(seed: int | None, **more: Any) -> SamplingParams:
    """32 tokens at temperature 0.8."""
    return SamplingParams(max_tokens=32, temperature=0.8, seed=seed, ignore_eos=True, **more)


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Further fields of the request under test."""
    return SHAPES[request.param]


def alone(shape: dict[str, Any]) -> list[int]:
    """Of an engine that has seen nothing else."""
    return TorchRig().answer(TOKENS, seeded(42, **shape)).tokens


def test_neighbours_change_nothing(shape: dict[str, Any]) -> None:
    rng = random.Random(1)
    right = alone(shape)
    assert len(right) == 32
    for neighbour in (None, 42):
        for place in (0, 3, 7):
            rig = TorchRig(n_blocks=120, budget=40)
            for number in range(8):
                if number == place:
                    mine = rig.submit(TOKENS, seeded(42, **shape))
                else:
                    seed = None if neighbour is None else neighbour + number
                    rig.submit(prompt(rng, rng.randint(5, 90)), seeded(seed, top_p=0.9))
                rig.step(number % 3)
            rig.run()
            assert rig.answers[mine].tokens == right


def test_eight_with_the_same_seed_say_the_same(shape: dict[str, Any]) -> None:
    rig = TorchRig(n_blocks=120, budget=64)
    asked = [rig.submit(TOKENS, seeded(42, **shape)) for _ in range(8)]
    rig.run()
    assert {tuple(rig.answers[each].tokens) for each in asked} == {tuple(alone(shape))}


def test_warm_preempted_and_on_another_engine(shape: dict[str, Any]) -> None:
    right = alone(shape)
    rig = TorchRig(n_blocks=14, budget=24)
    for _ in range(3):
        answer = rig.answer(TOKENS, seeded(42, **shape))
        assert answer.tokens == right
    assert answer.last.cached_tokens == 64
    rig.submit(prompt(random.Random(2), 100), seeded(7))
    mine = rig.submit(TOKENS, seeded(42, **shape))
    rig.run()
    assert rig.loop.stats.preemptions > 0
    assert rig.answers[mine].tokens == right
    other = TorchRig(n_blocks=200, block_size=5, budget=11, caching=False)
    assert other.answer(TOKENS, seeded(42, **shape)).tokens == right


def test_without_a_seed_and_with_another_one_answers_differ() -> None:
    rig = TorchRig()
    without = {tuple(rig.answer(TOKENS, seeded(None)).tokens) for _ in range(20)}
    others = {tuple(rig.answer(TOKENS, seeded(seed)).tokens) for seed in range(20)}
    assert len(without) > 1
    assert len(others) == 20


async def test_over_http(torch_worker, pair) -> None:
    """Choices of one request, alone and beside others; a second process says the same."""
    body = completion(list(TOKENS), temperature=0.8, seed=42, max_tokens=32, n=3)
    async with Client(torch_worker.url) as client:
        first = [choice["text"] for choice in (await client.ask(COMPLETIONS, body))["choices"]]
        assert len(set(first)) == 3
        crowd = [completion([97 + n] * 40, temperature=1, max_tokens=40) for n in range(7)]
        answers = await asyncio.gather(*(client.ask(COMPLETIONS, each) for each in [body, *crowd]))
        assert [choice["text"] for choice in answers[0]["choices"]] == first
        assert (await client.stream(COMPLETIONS, body)).text(2) == first[2]
    texts = []
    for url in pair.urls:
        async with Client(url) as client:
            texts += [(await client.ask(COMPLETIONS, body))["choices"][1]["text"]]
    assert texts[0] == texts[1]
