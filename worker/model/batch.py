"""A step plan as tensors: what the model and the attention function read during one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.kvcache import KvPool
from worker.runner import StepPlan


@dataclass(frozen=True, slots=True)
class Span:
    """One chunk inside the packed step.

    Rows ``row .. row+length`` of the step are positions ``start .. start+length`` of a sequence,
    and ``slots`` says where KV of its positions ``0 .. start+length`` lies.
    """

    row: int
    length: int
    start: int
    slots: slice | Tensor

    @property
    def end(self) -> int:
        """Tokens of the sequence once this step is done."""
        return self.start + self.length

    def kv(self, cache: Tensor, first: int = 0) -> Tensor:
        """Keys or values of positions ``first .. end``: ``[heads, end-first, dim]``."""
        if isinstance(self.slots, slice):
            part = cache[self.slots.start + first : self.slots.stop]
        else:
            part = cache.index_select(0, self.slots[first:])
        return part.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """What a kernel that reads the block table itself needs; int32 on the device."""

    query_starts: Tensor
    """``[n+1]`` rows at which the spans begin, and their total."""
    kv_lengths: Tensor
    """``[n]``"""
    block_table: Tensor
    """``[n, most blocks]``, padded with 0."""
    longest_query: int
    longest_kv: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One packed forward of ``T`` tokens."""

    ids: Tensor
    """``[1, T]``"""
    positions: Tensor
    """``[1, T]``"""
    write_slots: Tensor
    """``[T]``: where the new KV goes."""
    spans: tuple[Span, ...]
    sampled_rows: Tensor
    """Rows whose logits are wanted."""
    pool: KvPool
    paged: PagedIndex | None
    """Set if a kernel that reads block tables is used; the spans' slots then stay on the CPU."""

    @property
    def views(self) -> int:
        """Spans whose KV is read in place."""
        return sum(isinstance(span.slots, slice) for span in self.spans)


def build_batch(plan: StepPlan, pool: KvPool, device: torch.device, *, paged: bool) -> StepBatch:
    """Lay ``plan`` out for one forward. Raises ``ValueError`` if a chunk lacks blocks."""
    ids: list[int] = []
    positions: list[int] = []
    writes: list[Tensor] = []
    spans: list[Span] = []
    sampled: list[int] = []
    for chunk in plan.chunks:
        row, end = len(ids), chunk.start + len(chunk.tokens)
        slots = pool.place(chunk.blocks, end)
        ids.extend(chunk.tokens)
        positions.extend(range(chunk.start, end))
        if isinstance(slots, slice):
            writes.append(torch.arange(slots.start + chunk.start, slots.stop))
        else:
            writes.append(slots[chunk.start :])
            if not paged:
                slots = slots.to(device, non_blocking=True)
        spans.append(Span(row, len(chunk.tokens), chunk.start, slots))
        if chunk.sample:
            sampled.append(len(ids) - 1)
    return StepBatch(
        ids=torch.tensor([ids]).to(device, non_blocking=True),
        positions=torch.tensor([positions]).to(device, non_blocking=True),
        write_slots=torch.cat(writes).to(device, non_blocking=True),
        spans=tuple(spans),
        sampled_rows=torch.tensor(sampled, dtype=torch.int64).to(device, non_blocking=True),
        pool=pool,
        paged=_paged_index(plan, spans, pool, device) if paged else None,
    )


def _paged_index(
    plan: StepPlan, spans: list[Span], pool: KvPool, device: torch.device
) -> PagedIndex:
    counts = [-(-span.end // pool.block_size) for span in spans]
    table = torch.zeros(len(spans), max(counts), dtype=torch.int32)
    for line, (chunk, count) in enumerate(zip(plan.chunks, counts, strict=True)):
        table[line, :count] = torch.tensor(chunk.blocks[:count], dtype=torch.int32)
    starts = [span.row for span in spans] + [spans[-1].row + spans[-1].length]
    return PagedIndex(
        query_starts=torch.tensor(starts, dtype=torch.int32).to(device),
        kv_lengths=torch.tensor([s.end for s in spans], dtype=torch.int32).to(device),
        block_table=table.to(device),
        longest_query=max(span.length for span in spans),
        longest_kv=max(span.end for span in spans),
    )
