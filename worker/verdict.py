"""Whether a sequence ends with its newest token."""

from __future__ import annotations

from worker.sequence import FinishReason, Sequence


def verdict(
    seq: Sequence, eos_token_ids: frozenset[int], max_len: int
) -> tuple[FinishReason | None, int | None]:
    """Why the newest token ends a sequence, and that token if it is an end or stop token.

    Stop strings are found by the detokenizer.

    :param max_len: longest sequence, prompt and answer together.
    """
    params, token = seq.params, seq.tokens[-1]
    ended = seq.guide is not None and seq.guide.ended
    eos = token in eos_token_ids and (ended or not params.ignore_eos)
    if (eos or token in params.stop_token_ids) and (ended or seq.output_len >= params.min_tokens):
        return FinishReason.STOP, token
    if ended:
        return FinishReason.STOP, None
    if seq.output_len >= params.max_tokens or len(seq.tokens) >= max_len:
        return FinishReason.LENGTH, None
    return None, None
