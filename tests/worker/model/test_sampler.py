"""Sampling: each rule by hand on small vocabularies, and draws that know no neighbours."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from worker.model.sampler import NOT_NUMBERS, Sampled, Sampler
from worker.runner import Chunk
from worker.sequence import SamplingParams

pytestmark = pytest.mark.torch
EOS = 4


def chunk_of(
    name: str = "a", context: tuple[int, ...] = (), prompt_len: int = 0, **p: Any
) -> Chunk:
    output_len = len(context) - prompt_len
    return Chunk(
        name, 0, (1,), (0,), True, SamplingParams(**p), context, prompt_len, max(0, output_len)
    )


def sample(logits: Tensor, *chunks: Chunk, rng: Random | None = None) -> list[int]:
    tokens = Sampler(frozenset({EOS}), rng or Random(1)).sample(logits, chunks).tokens
    return [tokens[chunk.seq_id] for chunk in chunks]


def drawn(logits: Tensor, n: int = 400, **params: Any) -> Counter[int]:
    """How often each token comes, over as many seeds."""
    rows = logits.expand(n, -1)
    return Counter(sample(rows, *(chunk_of(str(i), seed=i, **params) for i in range(n))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_greedy_takes_the_best(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 3, 1, 2, -1], [5.0, 3, 1, 2, -1]], dtype=dtype)
    assert sample(logits, chunk_of("a", temperature=0), chunk_of("b", temperature=0)) == [1, 0]


def test_no_chunk_no_token() -> None:
    assert Sampler(frozenset(), Random()).sample(torch.empty(0, 5), []) == Sampled({}, {}, {})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_are_not_numbers_fail_alone(bad: float, dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max
    rows = torch.tensor([[0.0, bad, 1], [0, 3, 1], [bad, bad, bad], [2, 1, large]], dtype=dtype)
    settings = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 1},
        {"temperature": 1, "seed": 1, "top_p": 0.5},
        {"temperature": 0, "repetition_penalty": 1.5},
    ]
    chunks = [chunk_of(str(row), **params) for row, params in enumerate(settings)]
    chosen = Sampler(frozenset({EOS}), Random(1)).sample(rows, chunks)
    assert chosen.tokens == {"1": 1, "3": 2}
    assert set(chosen.logprobs) == {"1"}
    assert chosen.failed == {"0": NOT_NUMBERS, "2": NOT_NUMBERS}


def test_a_row_is_looked_at_before_anything_hides_a_part_of_it() -> None:
    """The minimum length forbids the one token whose logit is no number."""
    row = torch.tensor([[0.0, 1, 1, 1, 1]])
    row[0, EOS] = math.nan
    chosen = Sampler(frozenset({EOS}), Random(1)).sample(row, [chunk_of(min_tokens=3)])
    assert (chosen.tokens, set(chosen.failed)) == ({}, {chunk_of().seq_id})


def test_draws_follow_the_distribution() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    counts = drawn(shares.log()[None], n=4000)
    for token, share in enumerate(shares.tolist()):
        assert abs(counts[token] / 4000 - share) < 0.03
    assert counts[4] == 0


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.tensor([[2.0, 1, 0, -1, -2]])
    assert drawn(logits, temperature=0.25)[0] > drawn(logits)[0] > drawn(logits, temperature=4)[0]
    assert drawn(logits, temperature=1e-30) == {0: 400}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.801}, {0, 1, 2}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.31}, {0, 1}),
        ({"min_p": 0.29}, {0, 1, 2}),
        # top-p is a share of what top-k left: 0.5 / 0.8 = 0.625
        ({"top_k": 2, "top_p": 0.6}, {0}),
        ({"top_k": 2, "top_p": 0.63}, {0, 1}),
        ({"min_p": 0.31, "top_p": 0.6}, {0}),
    ],
)
def test_filters_keep_exactly(params: dict[str, Any], kept: set[int]) -> None:
    # token 3 has 0.05, and token 4 nothing
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05, 0.0]]).log()
    assert set(drawn(logits, **params)) == kept


def test_filters_beyond_the_shortlist() -> None:
    """Flat over 5000 tokens: the nucleus is longer than the list that is looked at first."""
    logits = torch.arange(5000, dtype=torch.float32)[None] * -1e-4
    order = torch.softmax(logits.double(), -1)[0].cumsum(0)
    last = int((order < 0.8).sum())
    tokens = set(drawn(logits, n=2000, top_p=0.8))
    assert last - 20 < max(tokens) <= last
    assert 1900 < max(drawn(logits, n=2000, top_k=2000)) < 2000
    floor = math.exp(-1e-4 * 3000)
    assert 2900 < max(drawn(logits, n=2000, min_p=floor)) <= 3000


def test_a_row_without_filter_beside_one_with() -> None:
    logits = torch.zeros(2, 50)
    seen = {
        tuple(sample(logits, chunk_of("a", seed=s), chunk_of("b", seed=s, top_k=50, top_p=1e-9)))
        for s in range(60)
    }
    assert len({a for a, _ in seen}) > 20
    assert all(0 <= b < 50 for _, b in seen)


def test_seeded_draws_do_not_depend_on_neighbours_or_rounding() -> None:
    torch.manual_seed(0)
    row = torch.randn(1, 1000)
    mine = chunk_of("mine", context=(1, 2, 3), prompt_len=1, seed=42, top_p=0.9)
    alone = sample(row, mine)[0]
    others = [chunk_of(str(i), seed=i, temperature=0.5 + i) for i in range(5)]
    rows = torch.cat(
        [torch.randn(3, 1000), row + 1e-6 * torch.randn(1, 1000), torch.randn(2, 1000)]
    )
    together = sample(rows, *others[:3], mine, *others[3:], rng=Random(99))
    assert together[3] == alone


def test_the_draw_changes_with_seed_and_position() -> None:
    logits = torch.zeros(1, 10_000)
    base = chunk_of(seed=1)
    by_seed = {sample(logits, chunk_of(seed=s))[0] for s in range(50)}
    by_position = {sample(logits, chunk_of(context=(1,) * n, seed=1))[0] for n in range(50)}
    assert len(by_seed) > 45
    assert len(by_position) > 45
    assert sample(logits, base) == sample(logits, base)
    assert sample(logits, chunk_of(), rng=Random(3)) != sample(logits, chunk_of(), rng=Random(4))


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[3.0, 2.9, -1.0, 0.0, 0.0]])
    said = {"context": (0, 2, 1, 1), "prompt_len": 2, "temperature": 0}
    # prompt 0 2, answer 1 1: presence and frequency touch only the answer
    assert sample(logits, chunk_of(**said, presence_penalty=-0.2)) == [1]
    assert sample(logits, chunk_of(**said, frequency_penalty=-0.06)) == [1]
    assert sample(logits, chunk_of(**said, frequency_penalty=-0.04)) == [0]
    assert sample(logits, chunk_of(**said, presence_penalty=5.0)) == [0]
    # repetition touches both, dividing what is positive and multiplying what is not
    assert sample(logits, chunk_of(**said, repetition_penalty=100.0)) == [0]
    near = torch.tensor([[-1.0, -1.5, -3.0, -2.5, -3.0]])
    assert sample(near, chunk_of(**said, repetition_penalty=3.0)) == [3]


def test_logit_bias_and_ids_outside_the_vocabulary() -> None:
    logits = torch.tensor([[3.0, 2.9, -1.0, 0.0, 0.0]])
    assert sample(logits, chunk_of(temperature=0, logit_bias={2: 5.0, 70: 9.0})) == [2]
    assert sample(logits, chunk_of(temperature=0, logit_bias={0: -100.0})) == [1]
    assert logits[0, 0] == 3.0


def test_min_tokens_hold_back_every_end() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 9.0]])
    early: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (3, 77)}
    assert sample(logits, chunk_of(context=(1,), **early)) == [2]
    assert sample(logits, chunk_of(context=(1, 1), **early)) == [EOS]
    assert sample(logits, chunk_of(context=(1,), ignore_eos=True, **early)) == [EOS]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0, 9.0]])
    chunks = (
        chunk_of("a", temperature=0, logprobs=2, logit_bias={1: 9.0}),
        chunk_of("b", temperature=0),
        chunk_of("c", temperature=0, logprobs=0),
    )
    rows = torch.cat([logits, logits[:1]])
    chosen = Sampler(frozenset(), Random()).sample(rows, chunks)
    tokens, logprobs = chosen.tokens, chosen.logprobs
    plain = logits[0].log_softmax(-1)
    assert tokens["a"] == 1
    assert set(logprobs) == {"a", "c"}
    assert logprobs["a"].logprob == pytest.approx(float(plain[1]))
    assert logprobs["a"].top == (
        (2, pytest.approx(float(plain[2]))),
        (1, pytest.approx(float(plain[1]))),
    )
    assert logprobs["c"].top == ()
    assert logprobs["c"].logprob == pytest.approx(float(plain[2]))


def test_only_allowed_tokens_are_chosen() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, 9.0]])
    assert sample(logits, chunk_of(temperature=0, allowed_token_ids=(1, 2))) == [1]
    assert set(drawn(logits, n=200, allowed_token_ids=(0, 3))) == {0, 3}
    # beside a row that may choose anything
    rows = torch.cat([logits, logits])
    free, bound = chunk_of("a", temperature=0), chunk_of("b", temperature=0, allowed_token_ids=(3,))
    assert sample(rows, free, bound) == [4, 3]
    # the minimum length forbids the end, but nothing else may be said
    only_end = chunk_of(temperature=0, allowed_token_ids=(EOS,), min_tokens=3)
    assert sample(logits, only_end) == [EOS]


def test_bad_words_depend_on_what_was_said() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    words = ((0,), (2, 2, 1))

    def next_after(*said: int, prompt: tuple[int, ...] = (2, 2)) -> int:
        chunk = chunk_of(
            context=(*prompt, *said), prompt_len=len(prompt), temperature=0, bad_words=words
        )
        return sample(logits, chunk)[0]

    assert next_after() == 1  # the prompt is no part of the answer
    assert next_after(2) == 1
    assert next_after(2, 2) == 2
    assert next_after(1, 2, 2) == 2
    assert next_after(2, 2, 1) == 1
