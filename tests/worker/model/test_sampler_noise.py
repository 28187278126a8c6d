"""A seeded draw holds under the rounding differences of another batch, chunking or cache state."""

from __future__ import annotations

from random import Random

import pytest
import torch

from worker.model.sampler import Sampler
from worker.runner import Chunk
from worker.sequence import SamplingParams

pytestmark = pytest.mark.torch
VOCABULARY, ROWS = 49_152, 64


def chunks(seed: int, **params: float) -> list[Chunk]:
    return [
        Chunk(
            seq_id=str(row),
            start=0,
            tokens=(1,),
            blocks=(0,),
            sample=True,
            params=SamplingParams(temperature=1.0, seed=seed * ROWS + row, **params),
            output_len=row,
        )
        for row in range(ROWS)
    ]


@pytest.mark.parametrize(
    ("params", "rounds"), [({}, 20), ({"min_p": 0.0001}, 5)], ids=["plain", "min_p"]
)
def test_rounding_noise_does_not_change_a_seeded_draw(
    params: dict[str, float], rounds: int
) -> None:
    sampler = Sampler(frozenset(), Random(1))
    source = torch.Generator().manual_seed(7)
    changed = 0
    for seed in range(rounds):
        # A flat distribution: most of the mass lies on tokens of very small probability each. The
        # error of a hidden state moves all logits together, so it moves a cumulative sum past many.
        logits = torch.randn(ROWS, VOCABULARY, generator=source) * 1.5
        noisy = logits * (1 + 1e-4 * torch.randn(ROWS, 1, generator=source))
        first = sampler.sample(logits, chunks(seed, **params)).tokens
        second = sampler.sample(noisy, chunks(seed, **params)).tokens
        changed += sum(first[row] != second[row] for row in first)
    assert changed <= 1, f"{changed} of {rounds * ROWS} draws changed"


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).repeat(4000, 1)
    sampler = Sampler(frozenset(), Random(3))
    asked = [
        Chunk(
            seq_id=str(row),
            start=0,
            tokens=(1,),
            blocks=(0,),
            sample=True,
            params=SamplingParams(temperature=1.0, seed=row),
        )
        for row in range(4000)
    ]
    drawn = sampler.sample(logits, asked).tokens
    share = [sum(token == wanted for token in drawn.values()) / 4000 for wanted in range(4)]
    for seen, expected in zip(share, logits[0].softmax(-1).tolist(), strict=True):
        assert abs(seen - expected) < 0.03


def test_neighbours_and_their_number_do_not_matter() -> None:
    sampler = Sampler(frozenset(), Random(5))
    logits = torch.randn(ROWS, 1000, generator=torch.Generator().manual_seed(2))
    together = sampler.sample(logits, chunks(1)).tokens
    for row, chunk in enumerate(chunks(1)):
        alone = sampler.sample(logits[row : row + 1], [chunk]).tokens
        assert alone[chunk.seq_id] == together[chunk.seq_id]
