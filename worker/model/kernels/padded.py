"""Decode steps by plain SDPA over padded copies: any device, any precision.

Only for steps of a fixed form, where no kernel of the device serves the model: copying every
sequence's KV to the length of the longest costs memory traffic, but the step can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.kernels.base import Chunked
from worker.model.kernels.gather import PaddedGather
from worker.model.kvcache import KvPool, LayerKv


class PaddedDecode:
    """A ``StaticAttend`` of ``rows`` decodes of up to ``longest`` tokens."""

    def __init__(self, pool: KvPool, device: torch.device, rows: int, longest: int) -> None:
        self._gather = PaddedGather(pool, device, rows, longest)
        self._rows = rows
        self._lengths = torch.ones(rows, dtype=torch.int64, device=device)
        self._places = torch.arange(self._gather.longest, device=device)

    def fill(self, chunks: Sequence[Chunked]) -> None:
        """As the protocol."""
        lengths = [chunk.end for chunk in chunks] + [1] * (self._rows - len(chunks))
        self._lengths.copy_(torch.tensor(lengths), non_blocking=True)
        self._gather.fill(chunks)

    def __call__(self, query: Tensor, layer: LayerKv, scale: float) -> Tensor:
        heads, rows, dim = query.shape
        kv_heads, window = layer.spec.kv_heads, layer.spec.window
        lengths = self._lengths[:, None]
        seen = self._places < lengths
        if window is not None:
            seen &= self._places >= lengths - window
        # the queries of a KV head side by side: [rows, kv_heads, group, dim]
        queries = query.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
        keys, values = (
            self._gather(cache).view(kv_heads, rows, self._gather.longest, -1).transpose(0, 1)
            for cache in (layer.keys, layer.values)
        )
        out = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen[:, None, None, :], scale=scale
        )
        return out.reshape(rows, heads, -1)
