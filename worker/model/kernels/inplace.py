"""FlashAttention on ranges of the pool: needs no block table, any block size, torch 2.6 and newer.

The kernel takes a start and a length for the keys of each sequence. Where the blocks of a sequence
follow one another, which the allocator prefers, those are a range of the pool itself and nothing is
copied. Sequences whose blocks are scattered are gathered into one tensor first, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.model.kernels.base import Attend, Chunked, StaticAttend, half_precision_refusal, int32
from worker.model.kernels.gather import Gather, PaddedGather, slots_of
from worker.model.kvcache import KvPool, LayerKv


def _flash(*args: Any, **more: Any) -> Any:
    return torch.ops.aten._flash_attention_forward(*args, **more)


@dataclass(frozen=True, slots=True)
class InPlace:
    """``aten::_flash_attention_forward`` with starts and used lengths of the keys."""

    flash: Callable[..., Any] = _flash
    name: str = "in_place"
    any_blocks: bool = False

    def refusal(self, device: torch.device, layers: Sequence[LayerKv], block_size: int) -> str:
        """As the protocol."""
        operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
        if operator is None or "seqused_k" not in str(operator.default._schema):
            return "needs a torch whose _flash_attention_forward takes seqused_k"
        return half_precision_refusal(device, layers)

    def prepare(self, chunks: Sequence[Chunked], pool: KvPool, device: torch.device) -> Attend:
        """As the protocol."""
        placed = [chunk for chunk in chunks if chunk.first_slot is not None]
        scattered = [chunk for chunk in chunks if chunk.first_slot is None]
        if not scattered:
            return _Ranges(self, *_ranges(placed, [c.first_slot or 0 for c in placed], device))
        return _Mixed(
            tuple(
                (_rows(part, device), self._part(part, pool, device, scattered=part is scattered))
                for part in (placed, scattered)
                if part
            )
        )

    def _part(
        self, chunks: Sequence[Chunked], pool: KvPool, device: torch.device, *, scattered: bool
    ) -> _Ranges:
        """One call's worth: rows are counted from 0 in the order of ``chunks``."""
        moved, row = [], 0
        for chunk in chunks:
            moved.append(Chunked(row, chunk.length, chunk.start, chunk.blocks, chunk.first_slot))
            row += chunk.length
        if not scattered:
            return _Ranges(self, *_ranges(moved, [c.first_slot or 0 for c in moved], device))
        slots = torch.cat([slots_of(chunk, pool.block_size) for chunk in moved])
        starts = [sum(c.end for c in moved[:i]) for i in range(len(moved))]
        gather = Gather(slots.to(device, non_blocking=True))
        return _Ranges(self, *_ranges(moved, starts, device), gather=gather)

    def static(
        self, pool: KvPool, device: torch.device, rows: int, longest: int, *, in_place: bool
    ) -> StaticAttend:
        """As the protocol."""
        gather = None if in_place else PaddedGather(pool, device, rows, longest)
        queries = torch.arange(rows + 1, dtype=torch.int32, device=device)
        spare = pool.spare_block * pool.block_size
        starts = torch.full_like(queries, spare) if gather is None else queries * gather.longest
        lengths = torch.ones(rows, dtype=torch.int32, device=device)
        return _Static(self, queries, starts, lengths, 1, longest, gather=gather, spare_slot=spare)


@dataclass(frozen=True, slots=True)
class _Ranges:
    kernel: InPlace
    query_starts: Tensor
    """``[n+1]``"""
    kv_starts: Tensor
    """``[n+1]``, in any order; the last one is not read."""
    kv_lengths: Tensor
    """``[n]``"""
    longest_query: int
    longest_kv: int
    gather: Gather | None = None
    """What to copy first; None: the ranges are of the pool."""

    def __call__(self, query: Tensor, layer: LayerKv, scale: float) -> Tensor:
        keys, values = layer.keys, layer.values
        if self.gather is not None:
            keys, values = self.gather(keys), self.gather(values)
        window = layer.spec.window
        out: Tensor = self.kernel.flash(
            query.transpose(0, 1).contiguous(),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            self.query_starts,
            self.kv_starts,
            self.longest_query,
            self.longest_kv,
            0.0,
            window is None,  # causal; a window says so by its right end
            False,
            scale=scale,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
            seqused_k=self.kv_lengths,
        )[0]
        return out


@dataclass(frozen=True, slots=True)
class _Mixed:
    """Some chunks are read in place and some are gathered: a call for each kind."""

    parts: tuple[tuple[Tensor, _Ranges], ...]

    def __call__(self, query: Tensor, layer: LayerKv, scale: float) -> Tensor:
        out = query.new_empty(query.shape[1], query.shape[0], layer.spec.value_dim)
        for rows, ranges in self.parts:
            out[rows] = ranges(query.index_select(1, rows), layer, scale)
        return out


@dataclass(frozen=True, slots=True)
class _Static(_Ranges):
    spare_slot: int = 0

    def fill(self, chunks: Sequence[Chunked]) -> None:
        """As the protocol."""
        spare = self.kv_lengths.shape[0] - len(chunks)
        lengths = [chunk.end for chunk in chunks] + [1] * spare
        self.kv_lengths.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)
        if isinstance(self.gather, PaddedGather):
            self.gather.fill(chunks)
            return
        starts = [chunk.first_slot or 0 for chunk in chunks] + [self.spare_slot] * (spare + 1)
        self.kv_starts.copy_(torch.tensor(starts, dtype=torch.int32), non_blocking=True)


def _rows(chunks: Sequence[Chunked], device: torch.device) -> Tensor:
    rows = [torch.arange(chunk.row, chunk.row + chunk.length) for chunk in chunks]
    return torch.cat(rows).to(device, non_blocking=True)


def _ranges(
    chunks: Sequence[Chunked], starts: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    ends = [chunk.row + chunk.length for chunk in chunks]
    return (
        int32([chunks[0].row, *ends], device),
        int32([*starts, 0], device),
        int32([chunk.end for chunk in chunks], device),
        max(chunk.length for chunk in chunks),
        max(chunk.end for chunk in chunks),
    )
