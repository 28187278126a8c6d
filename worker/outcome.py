"""What the scheduler reports: per sequence and step, and in total."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from worker.sequence import FinishReason, Sequence, TokenLogprob


class TokenOut(msgspec.Struct, frozen=True):
    """What a step did to one sequence."""

    seq: Sequence
    token: int | None
    """The sampled token; None if the step failed."""
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    """``token``, if it ended the sequence as end or stop token."""
    error: str | None = None
    """Why, if ``finish`` is ``ERROR`` or ``GRAMMAR``."""


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    cached_tokens: int = 0
    """Prompt tokens found in the cache at first admission."""
    host_tokens: int = 0
    """The part of them that came from host memory."""
    blocks_moved_out: int = 0
    """Copied from the device to host memory."""
    blocks_moved_in: int = 0
    """Copied back."""
    computed_tokens: int = 0
    """Prefill tokens computed for sequences that were never preempted."""
    recomputed_tokens: int = 0
    """Prefill tokens computed for sequences that had been preempted."""
    decode_tokens: int = 0
    """Sampled tokens."""
    preemptions: int = 0
    deadlines: int = 0
    """Sequences that ended because their deadline passed."""
    held_back: int = 0
    """Times a request was made to wait for a sibling to compute their shared prefix."""
