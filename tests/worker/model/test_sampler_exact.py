"""The sampler draws from exactly the distribution that its parameters describe.

The reference below is written in plain Python from the definitions, in vLLM's order. The draws of
4000 fixed seeds are compared with it by a chi-square test, so the outcome never changes: a wrong
order, a wrong threshold or a skewed generator is seen, luck is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from worker.model.sampler import Sampler
from worker.runner import Chunk
from worker.sequence import SamplingParams

pytestmark = pytest.mark.torch
DRAWS = 4000
SIZE = 24
PROMPT, SAID = (1, 2, 3, 3), (3, 4, 4, 4, 7)


def softmax(values: Sequence[float]) -> list[float]:
    """Probabilities."""
    best = max(values)
    weights = [math.exp(value - best) for value in values]
    return [weight / sum(weights) for weight in weights]


def exact(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """What each token's probability is by definition."""
    values = [logit + params.logit_bias.get(token, 0.0) for token, logit in enumerate(logits)]
    for token in {*PROMPT, *SAID}:
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, times in Counter(SAID).items():
        values[token] -= params.frequency_penalty * times + params.presence_penalty
    if params.allowed_token_ids:
        values = [v if t in params.allowed_token_ids else -math.inf for t, v in enumerate(values)]
    shares = softmax([value / params.temperature for value in values])
    kept = {token for token in range(SIZE) if shares[token] >= params.min_p * max(shares)}
    ranked = sorted(kept, key=lambda token: -shares[token])
    if params.top_k:
        ranked = ranked[: params.top_k]
    whole = sum(shares[token] for token in ranked)
    nucleus, reached = [], 0.0
    for token in ranked:
        if params.top_p < 1 and reached >= params.top_p * whole:
            break
        nucleus.append(token)
        reached += shares[token]
    total = sum(shares[token] for token in nucleus)
    return [shares[token] / total if token in nucleus else 0.0 for token in range(SIZE)]


def drawn(logits: torch.Tensor, seeded: bool, **fields: Any) -> Counter[int]:
    """How often each token was chosen; by a seed for each draw, or by one stream for all."""
    sampler = Sampler(frozenset(), Random(5))
    found: Counter[int] = Counter()
    for first in range(0, DRAWS, 500):
        chunks = []
        for draw in range(first, first + 500):
            params = SamplingParams(seed=draw if seeded else None, **fields)
            context = PROMPT + SAID
            chunks.append(
                Chunk(
                    seq_id=str(draw),
                    start=len(context) - 1,
                    tokens=context[-1:],
                    blocks=(0,),
                    sample=True,
                    params=params,
                    context=context,
                    prompt_len=len(PROMPT),
                    output_len=len(SAID),
                )
            )
        tokens = sampler.sample(logits.expand(500, -1), chunks).tokens
        found.update(tokens.values())
    return found


def surprise(found: Counter[int], shares: Sequence[float]) -> float:
    """Chi-square per degree of freedom; infinite if something impossible was drawn. Tokens that are
    expected less than five times count as one."""
    if any(shares[token] == 0 for token in found):
        return math.inf
    rare = [token for token in range(SIZE) if 0 < shares[token] * DRAWS < 5]
    groups = [[token] for token in range(SIZE) if shares[token] * DRAWS >= 5] + [rare] * bool(rare)
    total = 0.0
    for group in groups:
        expected = sum(shares[token] for token in group) * DRAWS
        total += (sum(found[token] for token in group) - expected) ** 2 / max(expected, 1e-9)
    return total / max(1, len(groups) - 1)


LIMIT = 2.2
"""Of 20 degrees of freedom, one in a thousand right samplers would be above it."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.4},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 7},
    "min_p": {"min_p": 0.08},
    "all filters": {"temperature": 0.9, "top_p": 0.85, "top_k": 12, "min_p": 0.03},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.5},
    "bias": {"logit_bias": {3: 1.5, 9: -2.0}},
    "allowed": {"allowed_token_ids": (2, 3, 4, 9, 11, 20)},
    "everything": {
        "temperature": 1.3,
        "top_p": 0.9,
        "top_k": 15,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.2,
        "logit_bias": {5: 1.0},
    },
}


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    """Of both signs, without ties."""
    torch.set_num_threads(1)
    return torch.randn(1, SIZE, generator=torch.Generator().manual_seed(3)) * 1.5


@pytest.mark.parametrize("seeded", [True, False], ids=["seeds", "stream"])
@pytest.mark.parametrize("case", list(CASES))
def test_draws_follow_the_exact_distribution(logits: torch.Tensor, case: str, seeded: bool) -> None:
    fields = {"temperature": 1.0, **CASES[case]}
    shares = exact(logits[0].tolist(), SamplingParams(**fields))
    found = drawn(logits, seeded, **fields)
    assert surprise(found, shares) < LIMIT
    distance = sum(abs(found[token] / DRAWS - shares[token]) for token in range(SIZE)) / 2
    assert distance < 0.04


def test_the_comparison_sees_each_parameter(logits: torch.Tensor) -> None:
    """Draws of one case never pass for another one."""
    plain = exact(logits[0].tolist(), SamplingParams())
    for case, changes in CASES.items():
        if case != "plain":
            fields = {"temperature": 1.0, **changes}
            other = exact(logits[0].tolist(), SamplingParams(**fields))
            sample = Random(1).choices(range(SIZE), weights=plain, k=DRAWS)
            assert surprise(Counter(sample), other) > LIMIT
    sample = Random(1).choices(range(SIZE), weights=plain, k=DRAWS)
    assert surprise(Counter(sample), plain) < LIMIT
