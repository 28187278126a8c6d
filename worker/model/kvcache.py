"""The paged KV memory: one pair of tensors per attention layer, addressed by slot.

Slot ``s`` belongs to block ``s // block_size``. Which blocks belong to whom is not known here.

On a CPU the memory is laid out head by head, so that attention over consecutive slots reads each
head as one stream (2 to 3 times as fast as with the heads of a token side by side). Kernels that
read block tables want a token's heads side by side; on a GPU the tensors are views of that.
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
    """Keys ``[kv_heads, slots, key_dim]`` and values ``[kv_heads, slots, value_dim]``."""

    spec: LayerSpec
    keys: Tensor
    values: Tensor

    def write(self, slots: slice | Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key`` and ``value`` ``[kv_heads, T, dim]`` at ``T`` slots."""
        if isinstance(slots, slice):
            self.keys[:, slots] = key
            self.values[:, slots] = value
        else:
            self.keys.index_copy_(1, slots, key)
            self.values.index_copy_(1, slots, value)

    def by_block(self, block_size: int) -> tuple[Tensor, Tensor]:
        """Keys and values as ``[blocks, block_size, kv_heads, dim]``; a view on a GPU only."""
        keys, values = self.keys.transpose(0, 1), self.values.transpose(0, 1)
        return (
            keys.reshape(-1, block_size, *keys.shape[1:]),
            values.reshape(-1, block_size, *values.shape[1:]),
        )


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
        slots = (n_blocks + 1) * block_size
        self.layers: dict[nn.Module, LayerKv] = {
            module: LayerKv(
                spec,
                _memory(slots, spec.kv_heads, spec.key_dim, spec.dtype, device),
                _memory(slots, spec.kv_heads, spec.value_dim, spec.dtype, device),
            )
            for module, spec in specs.items()
        }

    @property
    def spare_block(self) -> int:
        """A block of nobody: rows that only fill up a recorded step read and write there."""
        return self.n_blocks

    def slot_of(self, blocks: Sequence[int], position: int) -> int:
        """Slot of one position. Raises ``ValueError`` if there is no block for it."""
        index, offset = divmod(position, self.block_size)
        if index >= len(blocks):
            raise ValueError(f"{len(blocks)} blocks do not hold position {position}")
        return blocks[index] * self.block_size + offset

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


def _memory(slots: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[heads, slots, dim]``, in the order that suits the device."""
    if device.type == "cpu":
        # Nothing here reads a slot that was not written, and untouched pages cost no memory.
        return torch.empty(heads, slots, dim, dtype=dtype, device=device)
    # Kernels on a GPU load whole tiles before they mask, where a NaN would survive.
    return torch.zeros(slots, heads, dim, dtype=dtype, device=device).transpose(0, 1)


def bytes_per_block(specs: Mapping[nn.Module, LayerSpec], block_size: int) -> int:
    """KV bytes of one block over all layers."""
    return block_size * sum(spec.bytes_per_token for spec in specs.values())
