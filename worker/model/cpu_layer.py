"""A whole forward pass of a model with ordinary layers (``ordinary.py``), by the worker's C code.

All layers are one call (``cpu_layer.c``) instead of some thirty of torch a layer, each of which
costs more than its arithmetic in a decoding step; where torch attends, a layer is two calls.
Any other model runs as it is, and so does a step that changes what modules do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.model.attention import attend_rows
from worker.model.batch import Decodes, Span, StepBatch
from worker.model.cpu_chunk import ChunkKernel
from worker.model.cpu_compile import open_library
from worker.model.cpu_native import Largest
from worker.model.kvcache import KvPool, LayerKv, LayerSpec
from worker.model.ordinary import NotOrdinary, OrdinaryLayer, ordinary, product_with_largest

_SOURCE = Path(__file__).with_name("cpu_layer.c")
ALL = slice(None)
_NOT_TAKEN = "the kernels for attention do not take these heads"


class _Layer(ctypes.Structure):
    """``struct layer`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("multiply", "qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm_before", "norm_after", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "between")),
        *((name, ctypes.c_int64) for name in ("window", "reach")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("threads", ctypes.c_int32),
    )


class _Step(ctypes.Structure):
    """``struct step`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "normed", "qkv", "attended", "gate_up")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "slots")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("attend", "runs")),
        *((name, ctypes.c_int64) for name in ("first_decode", "decodes")),
        *((name, ctypes.c_void_p) for name in ("attend_chunk", "chunks")),
        ("chunk_count", ctypes.c_int64),
        ("attention", ctypes.c_void_p),
    )


class _Chunk(ctypes.Structure):
    """``struct chunk`` of the source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("row", "rows", "start", "first_slot")),
        ("slots", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class _Space:
    """Memory for what lies between the calls, for up to so many rows."""

    rows: int
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor


@dataclass(frozen=True, slots=True)
class _Placed:
    """A layer and its KV in a pool."""

    layer: OrdinaryLayer
    kv: LayerKv
    struct: _Layer
    address: int
    """Of the struct."""


class LayerForward:
    """Logits ``[S, V]`` of a batch. Called from one thread at a time.

    Raises ``NotOrdinary`` if the model is not, ``NoCpuKernels`` if the library cannot be had.

    :param folder: where compiled libraries are kept.
    :param largest: finds the largest of each row of other logits than those made here last.
    """

    def __init__(
        self,
        model: Any,
        specs: Mapping[nn.Module, LayerSpec],
        folder: Path,
        threads: int,
        largest: Callable[[Tensor], Largest],
    ) -> None:
        decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        self._head_with_largest = product_with_largest(self._head)
        self._find_largest = largest
        self._found: tuple[Tensor, Largest] | None = None
        try:
            self._embedding = decoder.embed_tokens.weight
            self._rotary, self._norm = decoder.rotary_emb, decoder.norm
            self.layers = [ordinary(layer, specs) for layer in decoder.layers]
        except AttributeError as error:
            raise NotOrdinary(str(error)) from error
        if len({layer.sizes for layer in self.layers}) != 1:
            raise NotOrdinary("its layers have several sizes")
        library = open_library(_SOURCE, folder)
        self._before = library.headwater_before_attention
        self._after = library.headwater_after_attention
        for function in (self._before, self._after):
            function.argtypes, function.restype = [ctypes.c_void_p] * 2, ctypes.c_int
        self._layers = library.headwater_layers
        self._layers.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._layers.restype = ctypes.c_int
        self._windows = list(dict.fromkeys(layer.window for layer in self.layers))
        self._threads = threads
        self.attention_time: ctypes.Array[ctypes.c_double] | None = None
        """Two numbers for measurements: steps that are one call add their attention's seconds."""
        self._pool: KvPool | None = None
        self._placed: list[_Placed] = []
        self._takes_chunks = False
        """Whether the kernel for chunks takes these layers."""
        self._space: _Space | None = None

    def __call__(self, batch: StepBatch) -> Tensor:
        """As ``LoadedModel.forward`` for the sampled rows."""
        return self.around(batch, ALL)

    def around(self, batch: StepBatch, layers: slice) -> Tensor:
        """The same with some of the layers only."""
        x = functional.embedding(batch.ids[0], self._embedding)
        self.through(x, batch, layers)
        x = self._norm(x.index_select(0, batch.sampled_rows))
        if self._head_with_largest is None:
            logits: Tensor = self._head(x)
            return logits
        self._found = self._head_with_largest(x)
        return self._found[0]

    def largest(self, logits: Tensor) -> Largest:
        """Of each row of ``logits``: known already if they are the latest from here, unchanged."""
        found, self._found = self._found, None
        if found is not None and found[0] is logits:
            return found[1]
        return self._find_largest(logits)

    def through(self, x: Tensor, batch: StepBatch, layers: slice) -> None:
        """Replace ``x`` ``[T, hidden]`` by what these layers make of it; writes KV."""
        rows = len(x)
        cosine, sine = (part.contiguous() for part in self._rotary(x, position_ids=batch.positions))
        space, slots = self._room(rows), batch.slots
        step = _Step(
            x.data_ptr(),
            *(t.data_ptr() for t in (space.normed, space.qkv, space.attended, space.gate_up)),
            *(t.data_ptr() for t in (cosine, sine, slots)),
            rows,
        )
        placed = self._in_pool(batch.pool)[layers]
        spans = tuple(span for span in batch.spans if span.slots is not None)
        if self._attends(batch, spans):
            self._all_at_once(placed, step, batch.decodes, spans, batch.chunks)
        else:
            self._one_by_one(placed, step, batch, space)

    def _attends(self, batch: StepBatch, spans: tuple[Span, ...]) -> bool:
        """Whether attention is ours for all rows of a step: its decodes and the other ``spans``."""
        if batch.decodes is not None and batch.decodes.first_row is None:
            return False
        return not spans or (batch.chunks is not None and self._takes_chunks)

    def _all_at_once(
        self,
        placed: list[_Placed],
        step: _Step,
        decodes: Decodes | None,
        spans: tuple[Span, ...],
        kernel: ChunkKernel | None,
    ) -> None:
        layers = (ctypes.c_void_p * len(placed))(*(each.address for each in placed))
        if decodes is not None:
            runs = [decodes.runs(window) for window in self._windows]
            addresses = [part.data_ptr() for each in runs for part in (each.slots, each.first)]
            by_window = (ctypes.c_void_p * len(addresses))(*addresses)
            step.attend, step.runs = decodes.function, ctypes.addressof(by_window)
            step.first_decode, step.decodes = decodes.first_row, len(decodes)
        if kernel is not None and spans:
            chunks = (_Chunk * len(spans))(*(_chunk(span) for span in spans))
            step.attend_chunk, step.chunks = kernel.function, ctypes.addressof(chunks)
            step.chunk_count = len(spans)
        if self.attention_time is not None:
            step.attention = ctypes.addressof(self.attention_time)
        failed = self._layers(layers, len(placed), ctypes.addressof(step))
        if failed:
            raise RuntimeError("no memory for a layer" if failed == 1 else _NOT_TAKEN)

    def _one_by_one(
        self, placed: list[_Placed], step: _Step, batch: StepBatch, space: _Space
    ) -> None:
        rows, first, where = step.rows, self.layers[0], ctypes.addressof(step)
        width = first.heads * first.dim
        query = space.qkv[:rows, :width].view(rows, first.heads, first.dim)
        out = space.attended[:rows].view(rows, first.heads, first.dim)
        for each in placed:
            if self._before(each.address, where):
                raise RuntimeError("no memory for a product")
            attend_rows(batch, each.kv, query, out, each.layer.scale)
            if self._after(each.address, where):
                raise RuntimeError("no memory for a product")

    def _room(self, rows: int) -> _Space:
        if self._space is None or self._space.rows < rows:
            first = self.layers[0]
            widths = (
                first.hidden,
                (first.heads + 2 * first.kv_heads) * first.dim,
                first.heads * first.dim,
                2 * first.between,
            )
            self._space = _Space(rows, *(torch.empty(rows, width) for width in widths))
        return self._space

    def _in_pool(self, pool: KvPool) -> list[_Placed]:
        if pool is not self._pool:
            self._placed = [
                self._place(layer, pool.layers[layer.attention]) for layer in self.layers
            ]
            self._takes_chunks = all(ChunkKernel.takes(each.kv.spec) for each in self._placed)
            self._pool = pool
        return self._placed

    def _place(self, layer: OrdinaryLayer, kv: LayerKv) -> _Placed:
        struct = _Layer(
            layer.qkv.function,
            *(p.weights for p in (layer.qkv, layer.o, layer.gate_up, layer.down)),
            *(w.data_ptr() for w in (layer.norm_before, layer.norm_after)),
            *(None if w is None else w.data_ptr() for w in (layer.q_norm, layer.k_norm)),
            *(kv.keys.data_ptr(), kv.values.data_ptr(), kv.keys.stride(1), kv.keys.stride(0)),
            *(layer.hidden, layer.heads, layer.kv_heads, layer.dim, layer.between),
            *(self._windows.index(layer.window), layer.window or 0),
            *(layer.eps, layer.scale),
            self._threads,
        )
        return _Placed(layer, kv, struct, ctypes.addressof(struct))


def _chunk(span: Span) -> _Chunk:
    """Its slots must outlive it."""
    slots, row = span.slots, (span.row, span.length, span.start)
    if isinstance(slots, Tensor):
        return _Chunk(*row, 0, slots.data_ptr())
    return _Chunk(*row, 0 if slots is None else slots.start, None)
