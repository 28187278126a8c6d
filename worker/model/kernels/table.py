"""torch's variable-length attention over a block table: reads every block where it lies.

Asks for a torch whose ``varlen_attn`` knows ``block_table``. The FlashAttention 2 inside torch
takes pages of a multiple of 256 tokens only; FlashAttention 3 (the package
``flash_attn_interface``, on Hopper) takes any. Version 2 must not split the keys: the rows of all
sequences but the first would stay unwritten (pytorch issue 194167). It also wants starts of the
keys, which it never reads, and version 3 refuses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.model.kernels.base import Attend, Chunked, StaticAttend, half_precision_refusal, int32
from worker.model.kernels.gather import block_table
from worker.model.kvcache import KvPool, LayerKv

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    _VARLEN: Callable[..., Any] | None = None
else:
    _VARLEN = varlen_attn

_PAGE = 256
_NEEDS = {"block_table", "seqused_k", "num_splits"}


@dataclass(frozen=True, slots=True)
class BlockTable:
    """``varlen_attn(block_table=...)``."""

    varlen: Callable[..., Any] | None = _VARLEN
    name: str = "block_table"
    any_blocks: bool = True

    def refusal(self, device: torch.device, layers: Sequence[LayerKv], block_size: int) -> str:
        """As the protocol."""
        if self.varlen is None or not set(inspect.signature(self.varlen).parameters) >= _NEEDS:
            return f"needs a torch whose varlen_attn takes {', '.join(sorted(_NEEDS))}"
        if block_size % _PAGE and not newer_flash():
            return f"needs FlashAttention 3, or blocks of a multiple of {_PAGE} tokens"
        return half_precision_refusal(device, layers)

    def prepare(self, chunks: Sequence[Chunked], pool: KvPool, device: torch.device) -> Attend:
        """As the protocol."""
        width = max(len(chunk.blocks) for chunk in chunks)
        ends = [chunk.row + chunk.length for chunk in chunks]
        return _Step(
            self,
            pool.block_size,
            int32([chunks[0].row, *ends], device),
            int32([chunk.end for chunk in chunks], device),
            block_table(chunks, len(chunks), width, 0).to(device, non_blocking=True),
            max(chunk.length for chunk in chunks),
            max(chunk.end for chunk in chunks),
        )

    def static(
        self, pool: KvPool, device: torch.device, rows: int, longest: int, *, in_place: bool
    ) -> StaticAttend:
        """As the protocol."""
        width = -(-longest // pool.block_size)
        return _Static(
            self,
            pool.block_size,
            torch.arange(rows + 1, dtype=torch.int32, device=device),
            torch.ones(rows, dtype=torch.int32, device=device),
            torch.full((rows, width), pool.spare_block, dtype=torch.int32, device=device),
            1,
            longest,
            pool.spare_block,
        )


@dataclass(frozen=True, slots=True)
class _Step:
    kernel: BlockTable
    block_size: int
    query_starts: Tensor
    """``[n+1]`` rows at which the chunks begin, and their total."""
    kv_lengths: Tensor
    table: Tensor
    """``[n, most blocks]``; what lies past a sequence's blocks is never read."""
    longest_query: int
    longest_kv: int

    def __call__(self, query: Tensor, layer: LayerKv, scale: float) -> Tensor:
        spec = layer.spec
        newer = newer_flash()
        keys, values = layer.by_block(self.block_size)
        assert self.kernel.varlen is not None
        out: Tensor = self.kernel.varlen(
            query.transpose(0, 1).contiguous(),
            keys,
            values,
            self.query_starts,
            None if newer else self.query_starts,
            self.longest_query,
            self.longest_kv,
            scale=scale,
            window_size=(-1 if spec.window is None else spec.window - 1, 0),
            enable_gqa=query.shape[0] != spec.kv_heads,
            seqused_k=self.kv_lengths,
            block_table=self.table,
            num_splits=None if newer else 1,
        )
        return out


@dataclass(frozen=True, slots=True)
class _Static(_Step):
    spare_block: int

    def fill(self, chunks: Sequence[Chunked]) -> None:
        """As the protocol."""
        rows, width = self.table.shape
        lengths = [chunk.end for chunk in chunks] + [1] * (rows - len(chunks))
        self.kv_lengths.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)
        lines = block_table(chunks, rows, width, self.spare_block)
        self.table.copy_(lines, non_blocking=True)


def newer_flash() -> bool:
    """Whether a FlashAttention newer than the 2 inside torch has been activated."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is not None and current() is not None
