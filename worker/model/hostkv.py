"""Blocks in host memory, and the copies between them and the KV pool.

A slot holds one block of all layers side by side as bytes, so whatever a layer keeps is moved
alike, and one transfer moves a whole block. On a device with memory of its own the host memory is
pinned: transfers are queued on the device's stream behind the computation that wrote what they
read, and before the one that reads what they write, and nobody waits for them here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from shared.hosttier import Copy, in_batches
from shared.types import Tier
from worker.model.kvcache import KvPool

BATCH_BYTES = 64 << 20
"""Most that is staged at a time."""


class HostKv:
    """Memory for ``n_slots`` blocks of a pool."""

    def __init__(self, pool: KvPool, n_slots: int, device: torch.device) -> None:
        self.n_slots = n_slots
        self._parts = [
            tensor.view(tensor.shape[0], -1, pool.block_size, tensor.shape[2])
            .transpose(0, 1)
            .view(torch.uint8)
            for layer in pool.layers.values()
            for tensor in layer.memory()
        ]
        """Per tensor of the pool a view ``[blocks, heads, block_size, bytes]``."""
        width = sum(part[0].numel() for part in self._parts)
        self._pinned = device.type == "cuda"
        self._device = device
        self._memory = torch.empty(n_slots, width, dtype=torch.uint8, pin_memory=self._pinned)
        self._at_once = max(1, BATCH_BYTES // width) if width else 1
        self._ends: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._took = 0.0

    def copy(self, copies: Sequence[Copy]) -> None:
        """Execute copies in their order; on CUDA they are only queued."""
        started = time.perf_counter()
        if self._pinned:
            self._ends = (_mark(), _mark())
            self._ends[0].record()
        for source, reads, writes in in_batches(copies):
            for first in range(0, len(reads), self._at_once):
                last = first + self._at_once
                if source is Tier.GPU:
                    self._out(reads[first:last], writes[first:last])
                else:
                    self._in(reads[first:last], writes[first:last])
        if self._ends is not None:
            self._ends[1].record()
        self._took = time.perf_counter() - started

    def seconds(self) -> float:
        """What the last :meth:`copy` took. Once the device is known to be done with it."""
        if self._ends is None:
            return self._took
        return float(self._ends[0].elapsed_time(self._ends[1])) / 1e3

    def _out(self, blocks: list[int], slots: list[int]) -> None:
        index = torch.tensor(blocks).to(self._device, non_blocking=True)
        staged = torch.cat([part.index_select(0, index).flatten(1) for part in self._parts], dim=1)
        for at, run in _runs(slots):
            self._memory[run].copy_(staged[at : at + run.stop - run.start], non_blocking=True)

    def _in(self, slots: list[int], blocks: list[int]) -> None:
        staged = torch.empty(
            len(slots), self._memory.shape[1], dtype=torch.uint8, device=self._device
        )
        for at, run in _runs(slots):
            staged[at : at + run.stop - run.start].copy_(self._memory[run], non_blocking=True)
        index = torch.tensor(blocks).to(self._device, non_blocking=True)
        first = 0
        for part in self._parts:
            size = part[0].numel()
            contents = staged[:, first : first + size].reshape(len(blocks), *part.shape[1:])
            part.index_copy_(0, index, contents)
            first += size


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _runs(slots: list[int]) -> Iterator[tuple[int, slice]]:
    """Maximal runs of ascending slots: where each starts in the list, and its slots."""
    start = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield start, slice(slots[start], slots[at - 1] + 1)
            start = at
