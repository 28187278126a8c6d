"""The paged KV memory: one pair of tensors per attention layer, addressed by slot.

Slot ``s`` belongs to block ``s // block_size``. Which blocks belong to whom is not known here.

On a CPU all that a token has in a layer lies together, each head's key beside its value: a block is
one long piece, which a processor reads faster than many short ones (ADR 9). Kernels that read block
tables want keys and values apart, the heads of a token side by side: so it is on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.model.hugepages import huge_empty


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
    both: Tensor | None = None
    """``[slots, kv_heads, key_dim + value_dim]``, if the two are views of one memory."""

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[kv_heads, n, dim]`` at ``n`` slots, copied."""
        if self.both is None:
            return self.keys.index_select(1, slots), self.values.index_select(1, slots)
        return _apart(self.both.index_select(0, slots), self.spec)

    def memory(self) -> list[Tensor]:
        """What holds keys and values, each with its slots in dimension 1."""
        if self.both is None:
            return [self.keys, self.values]
        return [self.both.flatten(1)[None]]

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
            module: _memory(spec, slots, device) for module, spec in specs.items()
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


def _memory(spec: LayerSpec, slots: int, device: torch.device) -> LayerKv:
    """Memory of one layer, in the order that suits the device."""
    heads = spec.kv_heads
    if device.type == "cpu":
        # Nothing here reads a slot that was not written, and untouched pages cost no memory.
        both = huge_empty((slots, heads, spec.key_dim + spec.value_dim), spec.dtype)
        return LayerKv(spec, *_apart(both, spec), both)
    # Kernels on a GPU load whole tiles before they mask, where a NaN would survive.
    keys, values = (
        torch.zeros(slots, heads, size, dtype=spec.dtype, device=device).transpose(0, 1)
        for size in (spec.key_dim, spec.value_dim)
    )
    return LayerKv(spec, keys, values)


def _apart(both: Tensor, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """Keys and values ``[kv_heads, n, dim]`` of ``[n, kv_heads, key_dim + value_dim]``: views."""
    heads = both.transpose(0, 1)
    return heads[..., : spec.key_dim], heads[..., spec.key_dim :]


def bytes_per_block(specs: Mapping[nn.Module, LayerSpec], block_size: int) -> int:
    """KV bytes of one block over all layers."""
    return block_size * sum(spec.bytes_per_token for spec in specs.values())
