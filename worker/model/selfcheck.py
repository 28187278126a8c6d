"""The last gate at load: the same few tokens through paged and through plain attention."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.model.attention import ATTENTION
from worker.model.batch import Layout, build_batch
from worker.model.kvcache import KvPool
from worker.model.support import Unsupported
from worker.model.weights import LoadedModel
from worker.runner import Chunk, StepPlan
from worker.sequence import SamplingParams

_TOKENS = 24
_SPLITS = ((0, 13), (13, 23), (23, 24))
"""A first chunk, a chunk with history, a decode step."""
_EXACT, _ROUNDED, _ROUGH = 1e-3, 0.2, 0.5
"""Largest relative distance of the logits: rounding alone stays well under, errors well over.

The second holds for 16-bit types, where a last bit may round an activation elsewhere. The third
is for int8: a difference in the seventh digit rounds some activations to another step, and 30
layers make 0.16 to 0.26 of that. Errors are found before, with the model at full precision.
"""


def check_against_plain(loaded: LoadedModel, block_size: int, layout: Layout) -> None:
    """Raises ``Unsupported`` if paged logits differ from those of the model's own attention.

    Catches what the look at its layers cannot see, such as state carried between tokens.
    """
    tokens = _tokens(loaded)
    with torch.inference_mode():
        plain, ours = plain_logits(loaded), _ours(loaded, tokens, block_size, layout)
    apart = distance(ours, plain)
    if not apart < _limit(loaded):
        raise Unsupported(
            f"{loaded.model.config.model_type} differs from plain attention by {apart:.1e}"
        )


def _limit(loaded: LoadedModel) -> float:
    if loaded.quantize != "none":
        return _ROUGH
    return _EXACT if loaded.dtype in (torch.float32, torch.float64) else _ROUNDED


def distance(logits: Tensor, wanted: Tensor) -> float:
    """Of ``logits`` from ``wanted``, relative to how far those are spread."""
    return float((logits - wanted).norm() / (wanted - wanted.mean()).norm())


def _tokens(loaded: LoadedModel) -> list[int]:
    count = min(_TOKENS, loaded.max_model_len)
    return [97 * (i + 1) % loaded.vocab_size for i in range(count)]


def plain_logits(loaded: LoadedModel) -> Tensor:
    """``[V]`` after a few tokens, with the model's own attention."""
    tokens = _tokens(loaded)
    loaded.model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([tokens], device=loaded.device)
        mask = torch.ones_like(ids)
        out = loaded.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    finally:
        loaded.model.set_attn_implementation(ATTENTION)
    return _precise(out.logits[0, -1])


def _ours(loaded: LoadedModel, tokens: list[int], block_size: int, layout: Layout) -> Tensor:
    n_blocks = -(-len(tokens) // block_size)
    pool = KvPool(loaded.layers, n_blocks, block_size, loaded.device)
    blocks = tuple(reversed(range(n_blocks)))
    logits = torch.empty(0)
    for start, stop in _SPLITS:
        part = tuple(tokens[start:stop])
        if not part:
            break
        chunk = Chunk("self-check", start, part, blocks, sample=True, params=SamplingParams())
        batch = build_batch(StepPlan((chunk,)), pool, layout)
        logits = loaded.forward(batch)[-1]
    return _precise(logits)


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
