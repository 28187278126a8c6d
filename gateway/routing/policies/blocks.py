"""Prompts and loads in blocks, as Dynamo's router counts them: what its two rules share."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.routing.base import Candidate, Query, key_tokens


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """One worker with the request on top; fractions of blocks count."""

    prefill: float
    """Prefill ahead of and with the request, less what the worker has cached of it; >= 0."""
    decode: float
    """KV held by or promised to those who are there."""
    incoming: float
    """The prompt."""


def block_load(query: Query, candidate: Candidate, host_credit: float) -> BlockLoad:
    """``host_credit``: what a block in host memory counts, one on the device counting 1."""
    worker = candidate.worker
    size = worker.block_size
    incoming = (query.prompt_tokens or key_tokens(query)) / size
    ahead = worker.booked_prefill_s / worker.prefill_s_per_token / size
    on_host = min(candidate.host_tokens, candidate.matched_tokens)
    credit = (candidate.matched_tokens - on_host + host_credit * on_host) / size
    return BlockLoad(
        prefill=max(0.0, ahead + incoming - credit),
        decode=worker.booked_decode_tokens / size,
        incoming=incoming,
    )
