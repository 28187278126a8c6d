"""A runner without torch: real block contents, deterministic tokens, modelled time.

It keeps what a KV cache keeps: each slot holds a digest of its token, its position and, as in a
real model, of everything the slot before it stands for. The next token is a function of what is
*read from the blocks* through the block table, never of the plan's tokens. So a block that is
reused wrongly, sealed too early or given to two sequences changes the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from shared.hosttier import Copy, in_batches
from shared.types import Tier
from worker.fake_adapters import FakeAdapters
from worker.guide import allows
from worker.runner import Chunk, RunnerError, StepPlan, StepResult, TokenLogprob
from worker.sequence import SamplingParams

SLOT = 8
"""Bytes that stand for the KV of one token."""

READABLE = tuple(b"eeeeeetttttaaaaaoooooiiiinnnnssssrrrrhhhlldducmfpgwyb         .,")
"""Byte tokens that look like text."""

CLOSING = tuple(b'"}]')
"""Byte tokens that end strings, objects and lists; under a grammar they are frequent."""

DECISIVE_BIAS = 20.0
"""A logit bias of this size forces or bans a token; smaller ones have no effect here."""


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Sizes and speed of a model that does not exist."""

    n_blocks: int
    block_size: int
    max_model_len: int = 4096
    vocab_size: int = 259
    vocabulary: tuple[int, ...] = READABLE
    """Ids that answers are made of; a repeated one is more frequent."""
    eos_token_ids: frozenset[int] = frozenset({257})
    eos_every: int = 64
    """An answer ends after so many tokens on average; 0 = only at its limit."""
    prefill_s_per_token: float = 0.0
    decode_s_per_step: float = 0.0
    max_lora_rank: int = 64
    host_blocks: int = 0
    copy_s_per_block: float = 0.0
    """Of a copy between device and host, either way."""


class FakeRunner:
    """Implements ``worker.runner.Runner``.

    :param sleep: called once per step with its modelled seconds.
    :param clock: seconds; what ``StepResult.seconds`` is measured with.
    :param rng: for sampling without a seed.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._model = model
        self._sleep = sleep
        self._clock = clock
        self._rng = rng
        self._slots = bytearray(model.n_blocks * model.block_size * SLOT)
        self.adapters = FakeAdapters(model.max_lora_rank)
        self._host = bytearray(model.host_blocks * model.block_size * SLOT)

    @property
    def n_blocks(self) -> int:
        """KV blocks that exist."""
        return self._model.n_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._model.block_size

    @property
    def host_blocks(self) -> int:
        """Slots for blocks in host memory."""
        return self._model.host_blocks

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        return self._model.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are in ``range(vocab_size)``."""
        return self._model.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless ``ignore_eos``."""
        return self._model.eos_token_ids

    def run(self, plan: StepPlan) -> StepResult:
        """Copy, write the chunks, then sample. Prefixes are read before any chunk of this step is
        written, so reuse of a block within the step that computes it is not forgiven."""
        started = self._clock()
        self._copy(plan.copies)
        copied = self._clock()
        for chunk in plan.chunks:
            self._require_room(chunk)
        prefixes = [self._read(chunk.blocks, 0, chunk.start) for chunk in plan.chunks]
        for chunk, prefix in zip(plan.chunks, prefixes, strict=True):
            self._write(chunk, prefix[-SLOT:])
        tokens: dict[str, int] = {}
        logprobs: dict[str, TokenLogprob] = {}
        scores: dict[str, tuple[TokenLogprob, ...]] = {}
        for chunk, prefix in zip(plan.chunks, prefixes, strict=True):
            if chunk.targets:
                scores[chunk.seq_id] = self._scores(chunk)
            if not chunk.sample:
                continue
            own = self._read(chunk.blocks, chunk.start, chunk.start + len(chunk.tokens))
            draw = self._draw(prefix + own, chunk)
            token = tokens[chunk.seq_id] = self._pick(draw, chunk)
            if chunk.params.logprobs is not None:
                logprobs[chunk.seq_id] = self._logprob(draw, token, chunk.params.logprobs)
        self._sleep(self._modelled_seconds(plan))
        return StepResult(
            tokens,
            logprobs,
            self._clock() - started,
            prompt_logprobs=scores,
            copy_seconds=copied - started,
        )

    def forget(self, seq_id: str) -> None:
        """Nothing is kept per sequence."""

    def close(self) -> None:
        """Free memory; no call follows."""
        self._slots.clear()
        self._host.clear()

    def _copy(self, copies: tuple[Copy, ...]) -> None:
        width = self.block_size * SLOT
        for source, reads, writes in in_batches(copies):
            device_first = source is Tier.GPU
            here, there = (self._slots, self._host) if device_first else (self._host, self._slots)
            contents = [bytes(here[src * width : (src + 1) * width]) for src in reads]
            for dst, content in zip(writes, contents, strict=True):
                there[dst * width : (dst + 1) * width] = content
        if copies:
            self._sleep(len(copies) * self._model.copy_s_per_block)

    def _require_room(self, chunk: Chunk) -> None:
        end = chunk.start + len(chunk.tokens)
        if not chunk.tokens or end > len(chunk.blocks) * self.block_size:
            raise RunnerError(f"chunk {chunk.start}:{end} does not fit its blocks")

    def _read(self, blocks: tuple[int, ...], start: int, end: int) -> bytes:
        """Contents of positions ``start .. end - 1`` as the block table says."""
        width = self.block_size * SLOT
        first, last = start // self.block_size, -(-end // self.block_size)
        data = b"".join(
            self._slots[block * width : (block + 1) * width] for block in blocks[first:last]
        )
        skip = start * SLOT - first * width
        return data[skip : skip + (end - start) * SLOT]

    def _write(self, chunk: Chunk, before: bytes) -> None:
        size = self.block_size
        seed = self.adapters.seed(chunk.adapter)
        for offset, token in enumerate(chunk.tokens):
            position = chunk.start + offset
            what = before + token.to_bytes(4, "little") + position.to_bytes(4, "little")
            what += seed
            before = xxhash.xxh3_64_digest(what)
            slot = (chunk.blocks[position // size] * size + position % size) * SLOT
            self._slots[slot : slot + SLOT] = before

    def _draw(self, contents: bytes, chunk: Chunk) -> int:
        """A 64-bit number that stands for logits and random stream together."""
        params = chunk.params
        extra = b""
        if params.penalised:
            extra += repr(
                (
                    chunk.context,
                    params.presence_penalty,
                    params.frequency_penalty,
                    params.repetition_penalty,
                )
            ).encode()
        if not params.greedy:
            stream = self._rng.getrandbits(64) if params.seed is None else params.seed
            extra += repr((stream, chunk.output_len, params.temperature)).encode()
        return xxhash.xxh3_64_intdigest(contents + extra)

    def _pick(self, draw: int, chunk: Chunk) -> int:
        params = chunk.params
        mask = chunk.allowed(self.eos_token_ids)
        if mask is not None:
            return self._pick_allowed(draw, mask, params)
        forbidden = chunk.forbidden()
        if chunk.output_len < params.min_tokens:
            forbidden |= self.eos_token_ids | set(params.stop_token_ids)
        forced = [
            token
            for token, bias in params.logit_bias.items()
            if bias >= DECISIVE_BIAS and token not in forbidden and not _banned(token, params)
        ]
        if forced:
            return max(forced, key=lambda token: (params.logit_bias[token], -token))
        may_end = not params.ignore_eos and chunk.output_len >= params.min_tokens
        if may_end and self._model.eos_every and draw % self._model.eos_every == 0:
            ends = sorted(token for token in self.eos_token_ids if not _banned(token, params))
            if ends:
                return ends[0]
        words = self._model.vocabulary
        first = (draw >> 16) % len(words)
        for step in range(len(words)):
            token = words[(first + step) % len(words)]
            if token not in forbidden and not _banned(token, params):
                return token
        if params.allowed_token_ids:
            return params.allowed_token_ids[first % len(params.allowed_token_ids)]
        raise RunnerError("logit_bias bans the whole vocabulary")

    def _pick_allowed(self, draw: int, mask: bytes, params: SamplingParams) -> int:
        """A token that a grammar allows: biased ones first, then what closes something (every
        second time), then any; an end every fourth time, or if there is nothing else."""
        allowed = [token for token in range(self.vocab_size) if allows(mask, token)]
        wanted = [token for token in allowed if not _banned(token, params)] or allowed
        words = [token for token in wanted if token not in self.eos_token_ids]
        every = self._model.eos_every
        if not words or (len(words) < len(wanted) and every and draw % min(every, 4) == 0):
            return next(token for token in wanted if token in self.eos_token_ids)
        forced = [t for t in words if params.logit_bias.get(t, 0.0) >= DECISIVE_BIAS]
        closing = [token for token in words if token in CLOSING] if draw >> 8 & 1 else []
        readable = [token for token in words if token < 128]
        choice = forced or closing or readable or words
        return choice[(draw >> 16) % len(choice)]

    def _logprob(self, draw: int, token: int, n_top: int) -> TokenLogprob:
        """Made-up but deterministic: the sampled token first, the rest of the vocabulary behind."""
        logprob = -((draw >> 8) % 1000 + 1) / 2000
        others = [other for other in sorted(set(self._model.vocabulary)) if other != token]
        ranked = [token, *others][:n_top]
        top = tuple((other, logprob - place) for place, other in enumerate(ranked))
        return TokenLogprob(logprob, top, rank=1)

    def _scores(self, chunk: Chunk) -> tuple[TokenLogprob, ...]:
        """Of each target, from what its position's slot holds; its rank may lie beyond the top."""
        n_top = chunk.params.prompt_logprobs or 0
        end = chunk.start + len(chunk.targets)
        held = self._read(chunk.blocks, chunk.start, end)
        scores = []
        for place, target in enumerate(chunk.targets):
            draw = int.from_bytes(held[place * SLOT : (place + 1) * SLOT], "little")
            best = -((draw >> 8) % 1000 + 1) / 2000
            others = [other for other in sorted(set(self._model.vocabulary)) if other != target]
            rank = min(draw % (n_top + 2), len(others))
            ranked = [*others[:rank], target, *others[rank:]][:n_top]
            top = tuple((token, best - behind) for behind, token in enumerate(ranked))
            scores.append(TokenLogprob(best - rank, top, rank + 1))
        return tuple(scores)

    def _modelled_seconds(self, plan: StepPlan) -> float:
        decodes = plan.n_decodes
        prefill = (plan.n_tokens - decodes) * self._model.prefill_s_per_token
        return prefill + (self._model.decode_s_per_step if decodes else 0.0)


def _banned(token: int, params: SamplingParams) -> bool:
    allowed = params.allowed_token_ids
    outside = bool(allowed) and token not in allowed
    return outside or params.logit_bias.get(token, 0.0) <= -DECISIVE_BIAS
