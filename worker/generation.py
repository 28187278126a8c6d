"""What the server hands to the engine and what it gets back; all values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import msgspec

from shared.blocks import SaltPoint
from shared.lifetimes import BlockLifetimes
from worker.guide import Grammar
from worker.sequence import FinishReason, SamplingParams, TokenLogprob

LATE = "The deadline passed before the answer was complete."
"""What a client is told when its request ends with ``FinishReason.DEADLINE``."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to generate (``n`` choices are ``n`` requests with the same prompt)."""

    id: str
    """Unique among the requests in flight."""
    prompt_tokens: Tokens[int]
    params: SamplingParams
    scope_root: bytes
    """Chain root (16 B) from ``shared.blocks.Scope.root``: KV is shared only within it."""
    priority: int = 0
    """Lower runs first."""
    grammar: Grammar | None = None
    """What the answer must be."""
    deadline: float | None = None
    """When it ends unfinished (seconds of the engine's clock); None = never."""
    shown: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that are part of the answer's text, and how; others are left out of it."""
    adapter: str = ""
    """Scope of the adapter that answers; ``scope_root`` is made with it."""
    salt: SaltPoint | None = None
    """A salt that is not in ``scope_root``, and enters behind a shared beginning."""


class Delta(msgspec.Struct, frozen=True):
    """What one step added to an answer. The counts are totals so far, not increments.

    ``text`` may be empty (an unfinished character, a possible stop string, a special token) and may
    belong to earlier tokens than ``token_ids``; joined over the answer both are complete.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    """One per token of ``token_ids``; None unless asked for."""
    finish: FinishReason | None
    """Set on the last delta, and only there."""
    cached_tokens: int
    prompt_tokens: int
    output_tokens: int
    """Includes the end token, if one ended the answer."""
    stop_reason: int | str | None = None
    """The token id or the stop string that ended the answer; None at any other end. The text of
    an end token is not part of the answer, its id is the last of ``token_ids``."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """With the first token, if asked for: of all tokens of the prompt but the first."""
    error: str | None = None
    """Why, when ``finish`` is ``ERROR``."""


class StepRecord(msgspec.Struct, frozen=True):
    """One forward pass, for histograms."""

    kind: str
    """``prefill``, ``decode`` or ``mixed``."""
    seconds: float
    tokens: int
    sequences: int


class EngineStats(msgspec.Struct, frozen=True):
    """Totals since start, and the state after the latest step."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    prefill_cached_tokens: int = 0
    """Prompt tokens taken from the cache at first admission."""
    prefill_computed_tokens: int = 0
    """Prompt tokens computed for the first time."""
    prefill_recomputed_tokens: int = 0
    """Tokens computed again after a preemption."""
    host_tokens: int = 0
    """The part of ``prefill_cached_tokens`` that came from host memory."""
    host_blocks_used: int = 0
    host_blocks_free: int = 0
    host_blocks_moved_out: int = 0
    """Blocks copied from the device to host memory."""
    host_blocks_moved_in: int = 0
    """Blocks copied back."""
    host_blocks_dropped: int = 0
    """Blocks that host memory had no room for any more."""
    lifetimes: BlockLifetimes = BlockLifetimes()
    decode_tokens: int = 0
    preemptions: int = 0
    deadlines: int = 0
    """Requests that ended because their deadline passed."""
    held_back: int = 0
    """Requests that waited for a sibling to compute their shared prefix."""
    steps: dict[str, int] = {}
    """Steps by kind."""
    step_seconds: dict[str, float] = {}
    """Seconds in steps, by kind."""
    batch_tokens: int = 0
    """Tokens of the latest step."""
