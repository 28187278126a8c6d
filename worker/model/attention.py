"""Paged attention behind transformers' attention interface.

One registered function serves every layer of every supported model. It writes the new keys and
values into the pool and lets each sequence attend to its own positions only, so a step may pack
chunks of any sequences. No mask is built by the model: causality, the layer's window and the soft
cap are applied here. All shapes below are per sequence: ``[heads, tokens, dim]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from worker.model.batch import Span, StepBatch
from worker.model.kvcache import LayerKv

ATTENTION = "headwater_paged"
"""Name under which transformers knows :func:`paged_attention`."""


def register() -> None:
    """Make :data:`ATTENTION` known to transformers. It has no mask entry: no mask is built."""
    AttentionInterface.register(ATTENTION, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **context: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer for one packed step.

    ``query`` ``[1, Hq, T, D]``, ``key`` and ``value`` ``[1, Hkv, T, D]``, ``context["paged"]`` the
    :class:`StepBatch`. Returns ``[1, T, Hq, Dv]``. Which other keyword arguments a model passes
    was checked once, when it was loaded.
    """
    batch: StepBatch = context["paged"]
    layer = batch.pool.layers[module]
    batch.write(layer, key[0], value[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if batch.kernel is not None:
        return batch.kernel(query[0], layer, scale)[None], None
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    attend_rows(batch, layer, query[0].transpose(0, 1), out, scale, softcap)
    return out[None], None


def attend_rows(
    batch: StepBatch,
    layer: LayerKv,
    query: Tensor,
    out: Tensor,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Attention of the rows of a step, whose KV has been written, sequence by sequence.

    ``query`` ``[T, Hq, D]``; ``out`` ``[T, Hq, Dv]`` is what they see.
    """
    if batch.decodes is not None:
        batch.decodes.attend(query, layer, out, scale)
        if len(batch.decodes) == len(batch.spans):
            return
    for span in batch.spans:
        if span.slots is None:
            continue
        rows = slice(span.row, span.row + span.length)
        if batch.chunks is not None and batch.chunks.takes(layer.spec):
            batch.chunks.attend(query[rows], layer, span.slots, span.start, out[rows], scale)
            continue
        part = _attend(query[rows].transpose(0, 1), layer, span, scale, softcap)
        out[rows] = part.transpose(0, 1)


def _attend(
    query: Tensor, layer: LayerKv, span: Span, scale: float, softcap: float | None
) -> Tensor:
    """Attention of one span; ``query`` ``[Hq, n, D]``."""
    window = layer.spec.window
    first = 0 if window is None else max(0, span.start - window + 1)
    key, value = span.kv(layer, first)
    windowed = window is not None and span.end > window
    if softcap is not None:
        mask = _lower_right(span.length, key.shape[1], window, query.device)
        return _capped(query, key, value, mask, scale, softcap)
    if span.length == 1:  # the window is already cut
        return _dense(query, key, value, scale)[0]
    if windowed:
        mask = _lower_right(span.length, key.shape[1], window, query.device)
        return _masked(query, key, value, mask, scale)
    if span.start == 0:
        return _causal(query, key, value, scale)[0]
    if not _has_lse(query, value):
        mask = _lower_right(span.length, key.shape[1], None, query.device)
        return _masked(query, key, value, mask, scale)
    past = _dense(query, key[:, : span.start], value[:, : span.start], scale)
    new = _causal(query, key[:, span.start :], value[:, span.start :], scale)
    return _merge(past, new).to(query.dtype)


def _has_lse(query: Tensor, value: Tensor) -> bool:
    """Whether the CPU flash kernel, which also returns the log-sum-exp, takes these."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
    """Every query sees every key. The queries of a KV head are stacked: no key is repeated."""
    heads, n, dim = query.shape
    stacked = query.reshape(1, key.shape[0], -1, dim)
    out, lse = _kernel(stacked, key[None], value[None], scale, causal=False)
    return out.reshape(heads, n, -1), None if lse is None else lse.reshape(heads, n)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor | None]:
    """As many keys as queries; query i sees keys ``0 .. i``."""
    heads, n, _ = query.shape
    grouped, keys, values = _by_kv_head(query, key, value)
    out, lse = _kernel(grouped, keys, values, scale, causal=True)
    return out.reshape(heads, n, -1), None if lse is None else lse.reshape(heads, n)


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor | None]:
    if _has_lse(query, value):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, lse
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
    return out, None


def _merge(past: tuple[Tensor, Tensor | None], new: tuple[Tensor, Tensor | None]) -> Tensor:
    """Softmax over two disjoint sets of keys from the softmax over each and its log-sum-exp."""
    (past_out, past_lse), (new_out, new_lse) = past, new
    assert past_lse is not None
    assert new_lse is not None
    share = torch.sigmoid(past_lse - new_lse)[..., None]
    return past_out * share + new_out * (1 - share)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    heads, n, _ = query.shape
    grouped, keys, values = _by_kv_head(query, key, value)
    out = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, scale=scale
    )
    return out.reshape(heads, n, -1)


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """``softmax(cap * tanh(scores / cap))``, in float32 at least."""
    heads, n, _ = query.shape
    grouped, keys, values = _by_kv_head(query, key, value)
    scores = (grouped @ keys.transpose(-1, -2)) * scale
    scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=precise).to(query.dtype)
    return (weights @ values).reshape(heads, n, -1)


def _by_kv_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``[Hkv, G, n, D]`` queries beside keys and values that are expanded, not copied."""
    kv_heads, group = key.shape[0], query.shape[0] // key.shape[0]
    grouped = query.reshape(kv_heads, group, query.shape[1], query.shape[2])
    return (
        grouped,
        key[:, None].expand(-1, group, -1, -1),
        value[:, None].expand(-1, group, -1, -1),
    )


def _lower_right(n: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """``[n, length]`` bool: the last query sees the last key; at most ``window`` keys each."""
    query = torch.arange(length - n, length, device=device)[:, None]
    key = torch.arange(length, device=device)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
