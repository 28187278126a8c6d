"""Log-probabilities of given tokens, of the model's own distribution.

Of a prompt every row is wanted, so the head's output would be ``prompt x vocabulary`` numbers: the
head is applied to a few rows at a time, and only the best few of each row are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from worker.runner import Chunk
from worker.sequence import TokenLogprob

NOT_NUMBERS = "the model produced logits that are not numbers"

ROWS_AT_ONCE = 128
"""Rows of logits in memory at a time: 25 MB at a vocabulary of 49152 in float32."""


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], wanted: Sequence[int]
) -> list[TokenLogprob]:
    """One per row of ``logits`` ``[R, V]``: of the row's token and of its ``wanted`` best."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = precise.logsumexp(-1, keepdim=True)
    best = precise.topk(min(max(wanted), precise.shape[-1]))
    chosen = precise.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (precise > chosen).sum(-1).add_(1).tolist()
    own = (chosen - total)[:, 0].tolist()
    ids, values = best.indices.tolist(), (best.values - total).tolist()
    return [
        TokenLogprob(own[row], tuple(zip(ids[row][:n], values[row][:n], strict=True)), ranks[row])
        for row, n in enumerate(wanted)
    ]


@dataclass(frozen=True, slots=True)
class Scored:
    """What is known of a step's targets, all per sequence id."""

    logprobs: Mapping[str, tuple[TokenLogprob, ...]]
    failed: Mapping[str, str]
    """Why nothing is."""


NOTHING_SCORED = Scored({}, {})


def score_prompts(chunks: Sequence[Chunk], logits_of: Callable[[Sequence[int]], Tensor]) -> Scored:
    """Of the targets of a step's chunks; one whose logits are no numbers fails alone.

    :param logits_of: logits ``[R, V]`` of ``R`` rows of the packed step, named by their numbers.
    """
    rows: list[int] = []
    targets: list[int] = []
    wanted: list[int] = []
    first = 0
    for chunk in chunks:
        rows += range(first, first + len(chunk.targets))
        targets += chunk.targets
        wanted += [chunk.params.prompt_logprobs or 0] * len(chunk.targets)
        first += len(chunk.tokens)
    found: list[TokenLogprob] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        found += token_logprobs(logits_of(rows[part]), targets[part], wanted[part])
    scores: dict[str, tuple[TokenLogprob, ...]] = {}
    failed: dict[str, str] = {}
    for chunk in chunks:
        own, found = found[: len(chunk.targets)], found[len(chunk.targets) :]
        if any(isnan(entry.logprob) for entry in own):
            failed[chunk.seq_id] = NOT_NUMBERS
        elif own:
            scores[chunk.seq_id] = tuple(own)
    return Scored(scores, failed)
