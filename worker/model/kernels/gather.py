"""Copying scattered KV together, for kernels that want it in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.model.kernels.base import Chunked
from worker.model.kvcache import KvPool


class Gather:
    """``gather(pool_tensor)``: the slots one after another, ``[heads, slots, dim]``."""

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots

    def __call__(self, cache: Tensor) -> Tensor:
        return cache.index_select(1, self.slots)


class PaddedGather(Gather):
    """``rows`` sequences of ``longest`` slots each, at an address that stays.

    What lies past a sequence's blocks, and the rows of none, come from the spare block.
    """

    def __init__(self, pool: KvPool, device: torch.device, rows: int, longest: int) -> None:
        size = pool.block_size
        self._rows, self._width, self._spare = rows, -(-longest // size), pool.spare_block
        self._offsets = torch.arange(size, device=device)
        self.longest = self._width * size
        super().__init__(torch.empty(rows * self.longest, dtype=torch.int64, device=device))
        self.fill(())

    def fill(self, chunks: Sequence[Chunked]) -> None:
        """Point at the blocks of these sequences."""
        table = block_table(chunks, self._rows, self._width, self._spare)
        starts = table.to(self.slots.device, torch.int64, non_blocking=True) * len(self._offsets)
        self.slots.copy_((starts[:, :, None] + self._offsets).flatten())


def slots_of(chunk: Chunked, block_size: int) -> Tensor:
    """Slots of positions ``0 .. end``, int64 on the CPU."""
    starts = torch.tensor(chunk.blocks, dtype=torch.int64) * block_size
    return (starts[:, None] + torch.arange(block_size)).reshape(-1)[: chunk.end]


def block_table(chunks: Sequence[Chunked], rows: int, width: int, filler: int) -> Tensor:
    """``[rows, width]`` int32 on the CPU: the blocks of each sequence, then ``filler``."""
    lines = [[*chunk.blocks, *([filler] * (width - len(chunk.blocks)))] for chunk in chunks]
    lines += [[filler] * width] * (rows - len(lines))
    return torch.tensor(lines, dtype=torch.int32)
