"""From logits to tokens.

Each row is one sequence. The draw of a seeded request depends on its seed, the number of tokens it
has so far and the row's own logits: never on its neighbours, on what was cached, or on preemption.
Order, as in vLLM: bias, minimum length, penalties, grammar, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from random import Random

import msgspec
import torch
from torch import Tensor

from worker.model.cpu_native import Largest
from worker.model.scores import NOT_NUMBERS, token_logprobs
from worker.runner import Chunk
from worker.sequence import SamplingParams, TokenLogprob

_SHORTLIST = 1024
"""Candidates that nearly always hold a whole nucleus; else all are sorted."""

_COLDEST = 1e-6
"""Lower temperatures choose the same token and would overflow float32."""


class Sampled(msgspec.Struct, frozen=True):
    """What was chosen, all per sequence id."""

    tokens: dict[str, int]
    logprobs: dict[str, TokenLogprob]
    """Where asked for."""
    failed: dict[str, str]
    """Why nothing was."""


FindLargest = Callable[[Tensor], Largest]


class Sampler:
    """Chooses tokens. ``rng`` serves the requests that name no seed.

    :param largest: finds the largest logit of each row.
    """

    def __init__(
        self, eos_token_ids: frozenset[int], rng: Random, largest: FindLargest | None = None
    ) -> None:
        self._eos = eos_token_ids
        self._rng = rng
        self._largest = largest or _largest

    def sample(self, logits: Tensor, chunks: Sequence[Chunk]) -> Sampled:
        """Choose for ``logits`` ``[S, V]``, a row per chunk; one that is no number fails alone."""
        if not chunks:
            return Sampled({}, {}, {})
        for chunk in chunks:
            if not chunk.params.plain or chunk.guide is not None:
                with torch.inference_mode():  # which alone takes longer than all that follows below
                    return self._choose(logits, chunks)
        highest, tokens = self._largest(logits)
        good = [value < inf for value in highest]
        if not all(good):
            return self._without_failed(logits, chunks, good)
        return Sampled({c.seq_id: t for c, t in zip(chunks, tokens, strict=True)}, {}, {})

    def _choose(self, logits: Tensor, chunks: Sequence[Chunk]) -> Sampled:
        """As :meth:`sample`, where more is asked for than the largest."""
        adjusted = self._adjust(logits, chunks)
        highest, tokens = self._largest(adjusted)
        good = [value < inf for value in highest]
        if adjusted is not logits:  # a mask may hide what is no number
            raw = logits.amax(-1).tolist()
            good = [fine and value < inf for fine, value in zip(good, raw, strict=True)]
        if not all(good):
            return self._without_failed(logits, chunks, good)
        random_rows = [row for row, chunk in enumerate(chunks) if not chunk.params.greedy]
        if random_rows:
            drawn = self._draw(adjusted[random_rows], [chunks[row] for row in random_rows])
            for row, token in zip(random_rows, drawn.tolist(), strict=True):
                tokens[row] = token
        by_id = {chunk.seq_id: token for chunk, token in zip(chunks, tokens, strict=True)}
        return Sampled(by_id, _logprobs(logits, tokens, chunks), {})

    def _without_failed(
        self, logits: Tensor, chunks: Sequence[Chunk], good: Sequence[bool]
    ) -> Sampled:
        sound = [row for row, fine in enumerate(good) if fine]
        rest = self.sample(logits[sound], [chunks[row] for row in sound])
        pairs = zip(chunks, good, strict=True)
        failed = {chunk.seq_id: NOT_NUMBERS for chunk, fine in pairs if not fine}
        return Sampled(rest.tokens, rest.logprobs, failed)

    def _adjust(self, logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """Logits after bias, minimum length and penalties; the given ones if no row asks."""
        asking = [row for row, chunk in enumerate(chunks) if _adjusts(chunk)]
        if not asking:
            return logits
        adjusted = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for row in asking:
            self._adjust_row(adjusted[row], chunks[row])
        masks = {row: chunks[row].allowed(self._eos) for row in asking}
        _constrain(adjusted, {row: mask for row, mask in masks.items() if mask is not None})
        return adjusted

    def _adjust_row(self, row: Tensor, chunk: Chunk) -> None:
        params, size = chunk.params, row.shape[0]
        # an id outside the vocabulary can never be chosen: a bias on it changes nothing
        biased = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < size}
        if biased:
            where = torch.tensor(list(biased), device=row.device)
            row[where] += torch.tensor(list(biased.values()), dtype=row.dtype, device=row.device)
        if chunk.guide is None and chunk.output_len < params.min_tokens:
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos)
            row[[token for token in ends if 0 <= token < size]] = float("-inf")
        forbidden = list(chunk.forbidden())
        if forbidden:
            row[forbidden] = float("-inf")
        _penalise(row, chunk)
        if params.allowed_token_ids:
            _keep_only(row, params.allowed_token_ids)

    def _draw(self, logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        params = [chunk.params for chunk in chunks]
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = precise / _column([max(p.temperature, _COLDEST) for p in params], precise)
        filtering = [row for row, p in enumerate(params) if p.top_p < 1 or p.top_k or p.min_p]
        if filtering:
            some = scaled[filtering]
            floor = _lowest_kept(some, [params[row] for row in filtering], _SHORTLIST)
            scaled[filtering] = some.masked_fill(some < floor, float("-inf"))
        # A race of exponential clocks, one per token (the Gumbel trick): a token's clock does not
        # depend on the others' logits, so rounding differences change the winner only where two
        # finish together. The inverse of a cumulative sum would be moved past many tokens at once.
        starts = [self._start(chunk) for chunk in chunks]
        return (scaled - _log_clocks(starts, scaled)).argmax(-1)

    def _start(self, chunk: Chunk) -> int:
        """Where the random stream of a request's next draw begins: 62 bits, room to count up."""
        seed = chunk.params.seed
        rng = self._rng if seed is None else Random(f"{seed}:{chunk.output_len}")
        return rng.getrandbits(62)


def _largest(logits: Tensor) -> Largest:
    best, where = logits.max(-1)
    return best.tolist(), where.tolist()


def _log_clocks(starts: Sequence[int], like: Tensor) -> Tensor:
    """Logarithms of exponential variates ``[R, V]``, the same on every device: a counter-based
    generator (the finisher of SplitMix64, Steele et al. 2014) over row start + token id."""
    # a row at a time and in place: all of it stays in the CPU's cache
    return torch.stack([_log_clock(start, like) for start in starts])


def _log_clock(start: int, like: Tensor) -> Tensor:
    state = torch.arange(start, start + like.shape[-1], device=like.device)
    state *= -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        state ^= (state >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        state *= factor
    state ^= (state >> 31).bitwise_and_((1 << 33) - 1)
    state >>= 11
    uniform = state.bitwise_and_((1 << 53) - 1).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().to(like.dtype)


def _adjusts(chunk: Chunk) -> bool:
    params = chunk.params
    return bool(
        params.logit_bias
        or chunk.guide is not None
        or chunk.output_len < params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words
        or params.allowed_token_ids
    )


def _keep_only(row: Tensor, tokens: Sequence[int]) -> None:
    """Leave one of ``tokens`` to choose, also where what came before has left none of them."""
    where = torch.tensor(tokens, device=row.device)
    values = row[where]
    if bool((values == float("-inf")).all()):
        values = torch.zeros_like(values)
    row.fill_(float("-inf"))
    row[where] = values


def _constrain(adjusted: Tensor, masks: Mapping[int, bytes]) -> None:
    """Leave in some rows only the tokens of a mask with a bit per token, all of equal size."""
    if not masks:
        return
    device, size = adjusted.device, adjusted.shape[-1]
    packed = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.uint8)
    packed = packed.view(len(masks), -1).to(device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    allowed = (packed[:, :, None] >> places & 1).flatten(1)[:, :size].bool()
    rows = torch.tensor(list(masks), device=device)
    # a model may have more logits than there are tokens
    width = allowed.shape[-1]
    adjusted[rows, :width] = adjusted[rows, :width].masked_fill(~allowed, float("-inf"))
    adjusted[rows, width:] = float("-inf")


def _penalise(row: Tensor, chunk: Chunk) -> None:
    """Repetition counts prompt and answer; presence and frequency count the answer only."""
    params = chunk.params
    if params.repetition_penalty != 1.0 and chunk.context:
        seen = torch.tensor(sorted(set(chunk.context)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(chunk.context[chunk.prompt_len :])
        if counts:
            said = torch.tensor(list(counts), device=row.device)
            times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
            row[said] -= params.frequency_penalty * times + params.presence_penalty


def _lowest_kept(scaled: Tensor, params: Sequence[SamplingParams], shortlist: int) -> Tensor:
    """Smallest logit ``[R, 1]`` that min-p, top-k and top-p leave in each row."""
    size = scaled.shape[-1]
    k = min(size, max(shortlist, *(p.top_k for p in params)))
    best = scaled.topk(k).values
    share = (best - scaled.logsumexp(-1, keepdim=True)).exp()
    top_k = _column([p.top_k or size for p in params], share)
    # 1.0 must keep everything, whatever rounding says of the last token
    top_p = _column([p.top_p if p.top_p < 1 else 2.0 for p in params], share)
    min_p = _column([p.min_p for p in params], share)
    allowed = (torch.arange(k, device=share.device) < top_k) & (share >= min_p * share[:, :1])
    kept_share = share * allowed
    complete = ~allowed[:, -1:] | (k == size)
    whole = torch.where(complete, kept_share.sum(-1, keepdim=True), 1.0)
    before = kept_share.cumsum(-1) - kept_share
    kept = allowed & (before < top_p * whole)
    kept[:, 0] = True
    if bool((~complete & (kept[:, -1:] | (min_p > 0))).any()):
        return _lowest_kept(scaled, params, size)  # the answer lies beyond the shortlist
    return best.gather(-1, kept.sum(-1, keepdim=True) - 1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _logprobs(
    logits: Tensor, tokens: Sequence[int], chunks: Sequence[Chunk]
) -> dict[str, TokenLogprob]:
    """Of the model's own distribution: before bias, penalties and temperature."""
    rows = [row for row, chunk in enumerate(chunks) if chunk.params.logprobs is not None]
    if not rows:
        return {}
    wanted = [chunks[row].params.logprobs or 0 for row in rows]
    found = token_logprobs(logits[rows], [tokens[row] for row in rows], wanted)
    return {chunks[row].seq_id: entry for row, entry in zip(rows, found, strict=True)}
