"""A step plan as tensors: what the model and the attention function read during one forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct

import msgspec
import torch
from torch import Tensor

from worker.model.cpu_chunk import ChunkKernel
from worker.model.cpu_kernels import CpuKernels, Runs, runs_of
from worker.model.kernels.base import Attend, Chunked, Kernel
from worker.model.kvcache import KvPool, LayerKv
from worker.runner import Chunk, StepPlan


class Span(msgspec.Struct, frozen=True):
    """One chunk inside the packed step.

    Rows ``row .. row+length`` of the step are positions ``start .. start+length`` of a sequence,
    and ``slots`` says where KV of its positions ``0 .. start+length`` lies; None if a kernel finds
    it by itself.
    """

    row: int
    length: int
    start: int
    slots: slice | Tensor | None

    @property
    def end(self) -> int:
        """Tokens of the sequence once this step is done."""
        return self.start + self.length

    def kv(self, layer: LayerKv, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of positions ``first .. end``: ``[heads, end-first, dim]``."""
        if isinstance(self.slots, slice):
            part = slice(self.slots.start + first, self.slots.stop)
            return layer.keys[:, part], layer.values[:, part]
        if self.slots is None:
            raise ValueError("the KV of this span is not laid out")
        return layer.gather(self.slots[first:])


class Decodes:
    """The spans of one row, which a kernel of their own serves together.

    :param rows: ascending; where in the step each of the chunks is.
    """

    def __init__(
        self, kernels: CpuKernels, rows: list[int], chunks: list[Chunk], block_size: int
    ) -> None:
        together = rows[-1] - rows[0] == len(rows) - 1
        self._count = len(rows)
        self.first_row = rows[0] if together else None
        """None if other rows lie between these."""
        self._rows = slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows)
        self._kernels = kernels
        self._tables = [(chunk.blocks, chunk.start + 1) for chunk in chunks]
        self._block_size = block_size
        self._runs: dict[int | None, Runs] = {}

    def __len__(self) -> int:
        return self._count

    def store(self, layer: LayerKv, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """KV of a whole step, which this kernel also writes faster than torch."""
        self._kernels.store(layer, slots, key, value)

    @property
    def function(self) -> int:
        """Address of the kernel, for C code."""
        return self._kernels.decode

    def runs(self, window: int | None) -> Runs:
        """Where the KV of these rows lies that a layer sees through its window."""
        if window not in self._runs:
            self._runs[window] = runs_of(self._tables, self._block_size, window)
        return self._runs[window]

    def attend(self, query: Tensor, layer: LayerKv, out: Tensor, scale: float) -> None:
        """Attention of these rows of ``query`` and ``out`` ``[T, Hq, D]``."""
        runs, rows = self.runs(layer.spec.window), self._rows
        if isinstance(rows, slice):
            self._kernels.attend(query[rows], layer, runs, out[rows], scale)
        else:
            part = query[rows]
            self._kernels.attend(part, layer, runs, part, scale)
            out[rows] = part


class StepBatch(msgspec.Struct, frozen=True):
    """One packed forward of ``T`` tokens."""

    ids: Tensor
    """``[1, T]``"""
    positions: Tensor
    """``[1, T]``"""
    write_slots: slice | Tensor
    """``[T]``: where the new KV goes."""
    spans: tuple[Span, ...]
    """All of them, in the order of their rows."""
    decodes: Decodes | None
    """Set if the kernel for decodes is used: it serves the spans whose ``slots`` is None."""
    sampled_rows: Tensor
    """Rows whose logits are wanted."""
    pool: KvPool
    kernel: Attend | None
    """Set if one kernel serves all spans; their slots then stay on the CPU."""
    chunks: ChunkKernel | None = None
    """Serves the other spans, one by one, if it takes their layer."""

    def write(self, layer: LayerKv, key: Tensor, value: Tensor) -> None:
        """Store the step's ``key`` and ``value`` ``[kv_heads, T, dim]``."""
        if self.decodes is not None and isinstance(self.write_slots, Tensor):
            self.decodes.store(layer, self.write_slots, key, value)
        else:
            layer.write(self.write_slots, key, value)

    @property
    def slots(self) -> Tensor:
        """``[T]``, int64: where the new KV goes."""
        where = self.write_slots
        return where if isinstance(where, Tensor) else torch.arange(where.start, where.stop)

    @property
    def views(self) -> int:
        """Spans whose KV is read in place."""
        return sum(not isinstance(span.slots, Tensor) for span in self.spans)


class Numbers:
    """What a step of so many single tokens says of each, in tensors that are used again and again.

    On caches that a step has emptied, to make tensors and to free them takes a quarter of all that
    happens between two forwards (ADR 9).
    """

    def __init__(self, rows: int) -> None:
        self._memory = bytearray(3 * 8 * rows)
        self._packed = Struct(f"{3 * rows}q")
        whole = torch.frombuffer(self._memory, dtype=torch.int64).view(3, rows)
        self.ids, self.positions, self.slots = whole[0:1], whole[1:2], whole[2]

    def fill(self, ids: list[int], positions: list[int], slots: list[int]) -> None:
        """Replace all of them; raises ``struct.error`` if there are more or fewer."""
        self._packed.pack_into(self._memory, 0, *ids, *positions, *slots)


class StepNumbers:
    """The tensors of steps of single tokens, by their number; those of one step at a time."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, bool], Numbers] = {}

    def of(self, rows: int) -> Numbers:
        """Until the next step, which overwrites them."""
        # A compiled model is compiled anew for tensors of the other mode.
        key = rows, torch.is_inference_mode_enabled()
        if key not in self._kept:
            self._kept[key] = Numbers(rows)
        return self._kept[key]


@dataclass(frozen=True, slots=True)
class Layout:
    """How steps are laid out for a model on a device.

    A batch holds until the next one is laid out.
    """

    device: torch.device
    kernel: Kernel | None = None
    """Serves whole steps."""
    cpu_kernels: CpuKernels | None = None
    """Serves the chunks of one token, if no kernel serves whole steps."""
    numbers: StepNumbers = field(default_factory=StepNumbers)


def build_batch(plan: StepPlan, pool: KvPool, layout: Layout) -> StepBatch:
    """Lay ``plan`` out for one forward. Raises ``ValueError`` if a chunk lacks blocks."""
    kernels = layout.cpu_kernels
    single = all(len(chunk.tokens) == 1 for chunk in plan.chunks)
    if single and kernels is not None and layout.kernel is None:
        return _singles(plan.chunks, pool, layout)
    ids: list[int] = []
    positions: list[int] = []
    writes: list[slice | Tensor | int] = []
    spans: list[Span] = []
    sampled: list[int] = []
    singles: dict[int, Chunk] = {}
    for chunk in plan.chunks:
        row, end = len(ids), chunk.start + len(chunk.tokens)
        ids.extend(chunk.tokens)
        positions.extend(range(chunk.start, end))
        if chunk.sample:
            sampled.append(len(ids) - 1)
        if kernels is not None and len(chunk.tokens) == 1:
            singles[row] = chunk
            writes.append(pool.slot_of(chunk.blocks, chunk.start))
            spans.append(Span(row, 1, chunk.start, None))
            continue
        slots = pool.place(chunk.blocks, end)
        if isinstance(slots, slice):
            writes.append(slice(slots.start + chunk.start, slots.stop))
        else:
            writes.append(slots[chunk.start :])
            if layout.kernel is None:
                slots = slots.to(layout.device, non_blocking=True)
        spans.append(Span(row, len(chunk.tokens), chunk.start, slots))
    device = layout.device
    return StepBatch(
        ids=torch.tensor([ids]).to(device, non_blocking=True),
        positions=torch.tensor([positions]).to(device, non_blocking=True),
        write_slots=_joined(writes, device),
        spans=tuple(spans),
        decodes=_decodes(kernels, singles, pool.block_size),
        sampled_rows=torch.tensor(sampled, dtype=torch.int64).to(device, non_blocking=True),
        pool=pool,
        kernel=None
        if layout.kernel is None
        else layout.kernel.prepare(chunked(plan, pool), pool, device),
        chunks=None if kernels is None else kernels.chunks,
    )


def _singles(chunks: tuple[Chunk, ...], pool: KvPool, layout: Layout) -> StepBatch:
    """The layout of a step in which every chunk is one token."""
    kernels = layout.cpu_kernels
    if kernels is None:
        raise ValueError("no kernel for decodes")
    starts = [chunk.start for chunk in chunks]
    ids = [chunk.tokens[0] for chunk in chunks]
    slots = [pool.slot_of(chunk.blocks, chunk.start) for chunk in chunks]
    rows = list(range(len(chunks)))
    sampled = [row for row, chunk in zip(rows, chunks, strict=True) if chunk.sample]
    together = len(sampled) == len(rows)
    numbers = layout.numbers.of(len(rows))
    numbers.fill(ids, starts, slots)
    return StepBatch(
        ids=numbers.ids,
        positions=numbers.positions,
        write_slots=numbers.slots,
        spans=tuple([Span(row, 1, start, None) for row, start in zip(rows, starts, strict=True)]),
        decodes=Decodes(kernels, rows, list(chunks), pool.block_size),
        sampled_rows=_all_rows(len(rows)) if together else torch.tensor(sampled, dtype=torch.int64),
        pool=pool,
        kernel=None,
    )


@lru_cache
def _all_rows(count: int) -> Tensor:
    """Numbers of so many rows; nobody writes into it."""
    return torch.arange(count)


def _decodes(
    kernels: CpuKernels | None, singles: dict[int, Chunk], block_size: int
) -> Decodes | None:
    if kernels is None or not singles:
        return None
    return Decodes(kernels, list(singles), list(singles.values()), block_size)


def _joined(writes: list[slice | Tensor | int], device: torch.device) -> slice | Tensor:
    """One slice if there is one, else an index tensor."""
    if len(writes) == 1 and isinstance(writes[0], slice):
        return writes[0]
    slots: list[int] = []
    for part in writes:
        if isinstance(part, int):
            slots.append(part)
        else:
            slots.extend(range(part.start, part.stop) if isinstance(part, slice) else part.tolist())
    return torch.tensor(slots).to(device, non_blocking=True)


def chunked(plan: StepPlan, pool: KvPool) -> list[Chunked]:
    """The layout of a step as kernels want it. Raises ``ValueError`` if a chunk lacks blocks."""
    size, row, layout = pool.block_size, 0, []
    for chunk in plan.chunks:
        length = len(chunk.tokens)
        count = -(-(chunk.start + length) // size)
        blocks = chunk.blocks[:count]
        if len(blocks) < count:
            raise ValueError(f"{len(blocks)} blocks do not hold {chunk.start + length} tokens")
        consecutive = blocks == tuple(range(blocks[0], blocks[0] + count))
        first_slot = blocks[0] * size if consecutive else None
        layout.append(Chunked(row, length, chunk.start, blocks, first_slot))
        row += length
    return layout
