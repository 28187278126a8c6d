"""A request inside the engine: what is asked, what has been computed, what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import lcm

from shared.blocks import GRANULE, GRANULE_BYTES, SaltPoint, key_of, next_state, pack_tokens
from shared.types import BlockKey
from worker.guide import Guide


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log) of a token and of the best alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    """Its place among all tokens, counted from 1; 0 = not counted."""


class FinishReason(StrEnum):
    """Why a sequence ended; ``STOP`` and ``LENGTH`` are the wire's values."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"
    GRAMMAR = "grammar"
    """Its grammar cannot be followed any further: a dead end, or beyond a limit."""


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
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Its whole prompt is computed then, whatever is cached."""
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop: bool = False
    """Whether the stop string, or the text of the token, that ended the answer is part of it."""
    allowed_token_ids: tuple[int, ...] = ()
    """If not empty, no other token is chosen."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that never become complete within the answer."""
    plain: bool = field(init=False, repr=False, compare=False)
    """Whether the most probable token is taken as it is, and nothing else is asked about it."""

    def __post_init__(self) -> None:
        plain = self.greedy and self.min_tokens <= 0 and self.logprobs is None
        plain = plain and not (self.penalised or self.logit_bias or self.allowed_token_ids)
        object.__setattr__(self, "plain", plain)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether a choice depends on the tokens so far, so that the runner needs them."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or bool(self.bad_words)
        )


class BlockChain:
    """Exact contents (``units``) and index keys of a growing token list's full blocks.

    Both are computed once per block, on demand. Only blocks whose end lies at a multiple of
    ``lcm(block, 16)`` tokens have a key, because index keys exist for whole granules only.

    :param salt: one that enters behind a shared beginning. The block that holds the first token
        behind it has the salt's mark in its contents as well: nobody without it has an equal one.
    """

    __slots__ = (
        *(
            "_block_size",
            "_extras",
            "_hashed",
            "_key_every",
            "_root",
            "_salted",
            "_state",
            "_units",
        ),
    )

    def __init__(self, scope_root: bytes, block_size: int, salt: SaltPoint | None = None) -> None:
        self._block_size = block_size
        self._extras = {} if salt is None else salt.extras()
        self._salted = (-1, b"") if salt is None else (salt.tokens // block_size, salt.mark)
        """Index of the block that has the mark, and the mark."""
        self._key_every = lcm(block_size, GRANULE) // block_size
        self._root = self._state = scope_root
        self._hashed = 0
        """Bytes that have entered ``_state``."""
        self._units: list[bytes] = []

    def units(self, tokens: list[int]) -> list[bytes]:
        """One packed piece per full block of ``tokens``, which only ever grows. Do not modify."""
        size = self._block_size
        for start in range(len(self._units) * size, len(tokens) // size * size, size):
            self._units.append(pack_tokens(tokens[start : start + size]))
            if start == self._salted[0] * size:
                self._units[-1] += self._salted[1]
        return self._units

    def key(self, index: int) -> BlockKey | None:
        """Key of block ``index``, whose unit exists; ask in ascending order, from any start."""
        if (index + 1) % self._key_every:
            return None
        end = (index + 1) * self._block_size * 4
        if end <= self._hashed:
            # Asked again after a preemption.
            self._state, self._hashed = self._root, 0
        first = self._hashed // 4 // self._block_size
        pieces = self._units[first : index + 1]
        if first <= self._salted[0] <= index:
            at = self._salted[0] - first
            pieces[at] = pieces[at][: self._block_size * 4]
        data, done = b"".join(pieces), self._hashed // GRANULE_BYTES
        for start in range(0, len(data), GRANULE_BYTES):
            extra = self._extras.get(done + start // GRANULE_BYTES, b"")
            granule = data[start : start + GRANULE_BYTES]
            self._state = next_state(self._state, granule, extra)
        self._hashed = end
        return key_of(self._state)


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
    """Chain root (16 B) of model, tokenizer, adapter and salt: KV is shared only within it."""
    arrived: float
    salt: SaltPoint | None = None
    """A salt that is not in ``scope_root``, and enters behind a shared beginning."""
    priority: int = 0
    """Lower runs first."""
    deadline: float | None = None
    """It ends unfinished at this time (monotonic seconds); None = never."""
    adapter: str = ""
    """Scope of the adapter that answers."""
    guide: Guide | None = None
    """Where in its grammar the answer is, as far as it is committed."""
    phase: Phase = Phase.WAITING
    computed: int = 0
    """Tokens whose KV is in the pool."""
    cached: int | None = None
    """Prompt tokens taken from the cache at first admission; None before it."""
    loaded: int = 0
    """Tokens whose KV came from host memory when it was last admitted."""
    blocks: list[int] = field(default_factory=list)
    table: tuple[int, ...] | None = None
    """``blocks`` as a value, which steps share; None after a change."""
    sealed: int = 0
    proven: int = 0
    """Leading tokens whose KV a good sample has read: at least these are not spoilt."""
    finish: FinishReason | None = None
    preemptions: int = 0
    order: int = 0
    """Place in the order of arrival, set by the scheduler."""
    urgency: int = 0
    """``priority``, or that of a more urgent request that waits for this one's prefix."""
    last_step: int = 0
    """Number of the last step that served it."""
    reusable: int = 0
    """While waiting: tokens found in the cache when last looked."""
    held_by: Sequence | None = None
    """A running prefill that computes a prefix this waiting request shares ..."""
    held_until: int = 0
    """... and how many blocks of it."""
    scores: list[TokenLogprob] = field(default_factory=list)
    """Of prompt tokens 1, 2, ..., as far as they are computed, if they were asked for."""

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first; the last of all is the first to be preempted."""
        return self.priority, self.order

    @property
    def output_len(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def scoring(self) -> bool:
        """Whether prompt tokens may still lack a log-probability that was asked for."""
        return self.params.prompt_logprobs is not None and self.output_len == 0

    @property
    def prefilling(self) -> bool:
        """Whether more than the newest token still has to be computed."""
        return len(self.tokens) - self.computed > 1
