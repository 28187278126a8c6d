"""A request inside the engine: what is asked, what has been computed, what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended; the values are the wire's, but for ``ABORT`` and ``ERROR``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Phase(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Ranges are checked where the request is parsed."""

    max_tokens: int = 16
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """None = off; else how many alternatives per token, 0 allowed."""
    min_tokens: int = 0
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0.0


@dataclass(eq=False, slots=True)
class Sequence:
    """One running generation. Owned by the engine thread; others read it only through deltas.

    Invariants: ``blocks`` covers at least ``computed`` tokens; the first ``sealed`` blocks are in
    the prefix tree; ``computed <= len(tokens)``; ``tokens[:prompt_len]`` never changes.
    """

    id: str
    tokens: list[int]
    """Prompt, then what was generated."""
    prompt_len: int
    params: SamplingParams
    scope_root: bytes
    """Chain root (16 B) of model, tokenizer, adapter and salt: sequences share KV only within it."""
    arrived: float
    priority: int = 0
    """Lower runs first."""
    phase: Phase = Phase.WAITING
    computed: int = 0
    """Tokens whose KV is in the pool."""
    cached: int | None = None
    """Prompt tokens taken from the cache at first admission; None before it."""
    blocks: list[int] = field(default_factory=list)
    sealed: int = 0
    finish: FinishReason | None = None
    preemptions: int = 0

    @property
    def output_len(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def prefilling(self) -> bool:
        """Whether more than the newest token still has to be computed."""
        return len(self.tokens) - self.computed > 1
