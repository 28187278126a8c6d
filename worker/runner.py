"""The seam between scheduling and computing: a plan value goes in, a result value comes out.

``fake_runner.FakeRunner`` (no torch, deterministic) and ``model.runner.TorchRunner`` implement it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from shared.hosttier import Copy
from worker.adapterstore import AdapterStore
from worker.guide import Guide, without
from worker.sequence import SamplingParams, TokenLogprob

__all__ = ["Chunk", "Runner", "RunnerError", "StepPlan", "StepResult", "TokenLogprob"]


class Chunk(msgspec.Struct, frozen=True):
    """Compute ``tokens`` of one sequence at positions ``start ...``.

    KV of positions before ``start`` is already in ``blocks``; the runner writes KV of the new
    positions there: position p lives in block ``blocks[p // block_size]``, slot ``p % block_size``.
    """

    seq_id: str
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: bool
    """Sample the token after the last of ``tokens``; false for all but a prompt's last chunk."""
    params: SamplingParams
    context: tuple[int, ...] = ()
    """All tokens so far, for penalties; given only if ``params`` need it."""
    prompt_len: int = 0
    output_len: int = 0
    """Tokens generated so far: the step counter of a seeded random stream."""
    adapter: str = ""
    """Scope of the adapter whose weights are added (``shared.load.AdapterInfo.scope``)."""
    targets: tuple[int, ...] = ()
    """Prompt tokens whose log-probability is wanted: the first follows the first of ``tokens``."""
    guide: Guide | None = None
    """Asked by the runner once the forward pass is under way, so that a device need not wait."""

    def allowed(self, eos_token_ids: frozenset[int]) -> bytes | None:
        """Tokens that its grammar lets follow, as :meth:`Guide.allowed`; None without a grammar.

        Ends that would come too early are left out, unless the grammar leaves nothing else.
        """
        if self.guide is None:
            return None
        early = self.output_len < self.params.min_tokens
        ends = eos_token_ids if early or self.params.ignore_eos else frozenset()
        if early:
            ends |= frozenset(self.params.stop_token_ids)
        mask = self.guide.allowed()
        return without(mask, ends) if ends else mask

    def forbidden(self) -> set[int]:
        """Last tokens of those ``bad_words`` that the answer so far has all the others of."""
        said = self.context[self.prompt_len :]
        return {
            word[-1]
            for word in self.params.bad_words
            if len(word) <= len(said) + 1 and said[len(said) + 1 - len(word) :] == word[:-1]
        }

    @property
    def decode(self) -> bool:
        """Whether this computes just the newest generated token."""
        return self.sample and self.output_len > 0 and len(self.tokens) == 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over chunks of several sequences, at most one chunk per sequence."""

    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...] = ()
    """Moves between device blocks and host slots, executed in this order before the pass."""

    @property
    def n_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def n_decodes(self) -> int:
        """Sequences that decode in this step."""
        return sum(1 for chunk in self.chunks if chunk.decode)

    @property
    def kind(self) -> str:
        """``decode``, ``prefill`` or ``mixed``."""
        decodes = self.n_decodes
        if decodes == len(self.chunks):
            return "decode"
        return "mixed" if decodes else "prefill"


class StepResult(msgspec.Struct, frozen=True):
    """Sampled token per sequence id, for exactly the chunks with ``sample`` that did not fail."""

    tokens: dict[str, int]
    logprobs: dict[str, TokenLogprob]
    seconds: float
    """Wall time of the pass, copies included."""
    failed: Mapping[str, str] = {}
    """Why, per sequence id that the model produced nothing usable for. The other sequences of the
    step are sound, since none reads another's."""
    prompt_logprobs: Mapping[str, tuple[TokenLogprob, ...]] = {}
    """Per sequence id one for each of ``targets``, for exactly the chunks that have some."""
    copy_seconds: float = 0.0
    """The part of ``seconds`` that the plan's copies took."""


class Runner(Protocol):
    """Executes plans. Called from the engine thread only."""

    @property
    def n_blocks(self) -> int:
        """KV blocks that exist."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def host_blocks(self) -> int:
        """Slots for blocks in host memory; 0 = no second tier."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are in ``range(vocab_size)``."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless ``ignore_eos``."""
        ...

    @property
    def adapters(self) -> AdapterStore:
        """LoRA adapters that chunks may name."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Copy, then compute; writes KV. Raises ``RunnerError`` if the step is lost as a whole:
        what its copies were to write is then undefined too."""
        ...

    def forget(self, seq_id: str) -> None:
        """Drop per-sequence state (random streams); unknown ids are fine."""
        ...

    def close(self) -> None:
        """Free memory; no call follows."""
        ...


class RunnerError(Exception):
    """A step failed; its sequences end with an error, the engine goes on."""
