"""The fake runner must notice every mistake that a KV cache would notice."""

from __future__ import annotations

import random

import pytest

from worker.fake_runner import FakeModel, FakeRunner
from worker.runner import Chunk, RunnerError, StepPlan
from worker.sequence import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def make(**model: object) -> FakeRunner:
    sizes: dict[str, object] = {"n_blocks": 8, "block_size": 4, "eos_every": 0} | model
    return FakeRunner(
        FakeModel(**sizes),  # type: ignore[arg-type]
        sleep=lambda _: None,
        clock=lambda: 0.0,
        rng=random.Random(1),
    )


def chunk(
    tokens: bytes,
    blocks: tuple[int, ...],
    *,
    start: int = 0,
    seq_id: str = "s",
    params: SamplingParams = GREEDY,
    output_len: int = 0,
    context: tuple[int, ...] = (),
) -> Chunk:
    return Chunk(
        seq_id,
        start,
        tuple(tokens),
        blocks,
        sample=True,
        params=params,
        output_len=output_len,
        context=context,
    )


def sampled(runner: FakeRunner, *chunks: Chunk) -> dict[str, int]:
    return runner.run(StepPlan(chunks)).tokens


def many(runner: FakeRunner, blocks: tuple[int, ...], start: int) -> list[int]:
    """Enough tokens to tell two contents apart."""
    return [sampled(runner, chunk(bytes([65 + i]), blocks, start=start))["s"] for i in range(12)]


@pytest.fixture
def expected() -> list[int]:
    runner = make()
    sampled(runner, chunk(b"abcdefgh", (0, 1)))
    return many(runner, (0, 1, 2), 8)


def test_the_answer_does_not_depend_on_where_blocks_lie_or_on_chunks(expected: list[int]) -> None:
    runner = make()
    sampled(runner, chunk(b"abc", (5,)))
    sampled(runner, chunk(b"defgh", (5, 2), start=3))
    assert many(runner, (5, 2, 7), 8) == expected


@pytest.mark.parametrize(
    "spoil",
    [
        lambda runner: sampled(runner, chunk(b"x", (0,), start=1)),
        lambda runner: sampled(runner, chunk(b"abce", (0,))),
        lambda runner: sampled(runner, chunk(b"xbcdefgh", (3, 1))),
    ],
    ids=["one slot", "one token", "same tokens behind another prefix"],
)
def test_a_spoiled_block_changes_the_answer(spoil, expected: list[int]) -> None:
    runner = make()
    sampled(runner, chunk(b"abcdefgh", (0, 1)))
    spoil(runner)
    assert many(runner, (0, 1, 2), 8) != expected


def test_a_block_of_the_same_step_counts_as_not_computed(expected: list[int]) -> None:
    runner = make()
    tokens = set()
    for letter in range(12):
        runner = make()
        both = sampled(
            runner,
            chunk(b"abcdefgh", (0, 1)),
            chunk(bytes([65 + letter]), (0, 1, 2), start=8, seq_id="t"),
        )
        tokens.add(both["t"] == expected[letter])
    assert False in tokens


def test_a_chunk_beyond_its_blocks_is_an_error() -> None:
    with pytest.raises(RunnerError):
        sampled(make(), chunk(b"abcde", (0,)))


def test_seeds_and_temperature() -> None:
    runner = make()

    def draw(params: SamplingParams, output_len: int = 0) -> int:
        return sampled(runner, chunk(b"abc", (0,), params=params, output_len=output_len))["s"]

    seeded = [draw(SamplingParams(seed=3), step) for step in range(20)]
    assert seeded == [draw(SamplingParams(seed=3), step) for step in range(20)]
    assert seeded != [draw(SamplingParams(seed=4), step) for step in range(20)]
    free = [draw(SamplingParams(), step) for step in range(20)]
    assert free != [draw(SamplingParams(), step) for step in range(20)]
    assert len({draw(GREEDY, step) for step in range(20)}) == 1


def test_penalties_depend_on_the_context() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    contexts = [tuple(range(n)) for n in range(1, 20)]
    answers = {
        sampled(make(), chunk(b"abc", (0,), params=params, context=context))["s"]
        for context in contexts
    }
    assert len(answers) > 1


def test_logit_bias_forces_and_bans() -> None:
    def pick(bias: dict[int, float], **model: object) -> int:
        params = SamplingParams(temperature=0.0, logit_bias=bias)
        return sampled(make(**model), chunk(b"abc", (0,), params=params))["s"]

    assert pick({257: 100.0}) == 257
    free = pick({})
    assert pick({free: -100.0}) != free
    assert pick({free: 1.0}) == free
    with pytest.raises(RunnerError):
        pick({65: -100.0}, vocabulary=(65,))


def test_answers_end_by_themselves_unless_told_not_to() -> None:
    def ends(params: SamplingParams) -> bool:
        runner = make(eos_every=4)
        tokens = [
            sampled(runner, chunk(bytes([letter]), (0,), params=params))["s"]
            for letter in range(60)
        ]
        return 257 in tokens

    assert ends(GREEDY)
    assert not ends(SamplingParams(temperature=0.0, ignore_eos=True))
    assert not ends(SamplingParams(temperature=0.0, min_tokens=1))


def test_logprobs_are_deterministic_and_hold_the_sampled_token_first() -> None:
    params = SamplingParams(temperature=0.0, logprobs=3)
    results = [make().run(StepPlan((chunk(b"abc", (0,), params=params),))) for _ in range(2)]
    assert results[0].logprobs == results[1].logprobs
    entry = results[0].logprobs["s"]
    assert entry.top[0] == (results[0].tokens["s"], entry.logprob)
    assert len(entry.top) == 3
    assert entry.logprob < 0


def test_time_is_modelled() -> None:
    slept: list[float] = []
    runner = FakeRunner(
        FakeModel(8, 4, prefill_s_per_token=0.5, decode_s_per_step=0.25),
        sleep=slept.append,
        clock=lambda: sum(slept),
        rng=random.Random(1),
    )
    decode = chunk(b"d", (1,), start=3, seq_id="t", output_len=1)
    seconds = [
        runner.run(StepPlan(chunks)).seconds
        for chunks in [(chunk(b"abc", (0,)),), (decode,), (chunk(b"abc", (0,)), decode)]
    ]
    assert seconds == [1.5, 0.25, 1.75]
