"""The paged KV memory: one pair of tensors per attention layer, addressed by slot.

Slot ``s`` belongs to block ``s // block_size``. Which blocks belong to whom is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer keeps per token, and how far back it looks."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None
    """Positions a query sees, itself included; None = all before it."""
    capped: bool = False
    """Whether scores are soft-capped, which only the exact path can do."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of key and value of one token."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Keys ``[slots, kv_heads, key_dim]`` and values ``[slots, kv_heads, value_dim]``."""

    spec: LayerSpec
    keys: Tensor
    values: Tensor

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key`` and ``value`` ``[kv_heads, T, dim]`` at ``slots`` ``[T]``."""
        self.keys.index_copy_(0, slots, key.transpose(0, 1))
        self.values.index_copy_(0, slots, value.transpose(0, 1))


class KvPool:
    """KV memory of ``n_blocks`` blocks for every attention layer of a model."""

    def __init__(
        self,
        specs: Mapping[nn.Module, LayerSpec],
        n_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.n_blocks, self.block_size = n_blocks, block_size
        slots = n_blocks * block_size
        # On a CPU nothing reads a slot that was not written, and untouched pages cost no memory.
        # Kernels on a GPU load whole tiles before they mask, where a NaN would survive.
        new = torch.empty if device.type == "cpu" else torch.zeros
        self.layers: dict[nn.Module, LayerKv] = {
            module: LayerKv(
                spec,
                new(slots, spec.kv_heads, spec.key_dim, dtype=spec.dtype, device=device),
                new(slots, spec.kv_heads, spec.value_dim, dtype=spec.dtype, device=device),
            )
            for module, spec in specs.items()
        }

    def place(self, blocks: Sequence[int], length: int) -> slice | Tensor:
        """Slots of positions ``0 .. length-1``: a slice if the blocks follow one another.

        A slice makes attention read a view of the pool; otherwise the index tensor (on the CPU)
        makes it gather.
        """
        size = self.block_size
        count = -(-length // size)
        used = tuple(blocks[:count])
        if len(used) < count:
            raise ValueError(f"{len(used)} blocks do not hold {length} tokens")
        first = used[0]
        if used[-1] - first == count - 1 and used == tuple(range(first, first + count)):
            return slice(first * size, first * size + length)
        starts = torch.tensor(used, dtype=torch.int64) * size
        return (starts[:, None] + torch.arange(size)).reshape(-1)[:length]


def bytes_per_block(specs: Mapping[nn.Module, LayerSpec], block_size: int) -> int:
    """KV bytes of one block over all layers."""
    return block_size * sum(spec.bytes_per_token for spec in specs.values())
