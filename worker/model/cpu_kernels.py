"""The worker's kernels for CPUs: ``cpu_kernels.c`` and ``cpu_attention.c``, compiled by
``cpu_compile.py``.

torch is built for large products. A decoding step multiplies few rows with all weights and attends
with one query a sequence: torch reads memory at half its speed then, and costs a call a sequence
and layer. The kernels read at nearly the speed of memory, scattered KV blocks in place (ADR 9).
Without a compiler, or if a result is off, torch's own functions serve, and the log says so.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.model.cpu_chunk import ChunkKernel
from worker.model.cpu_native import Largest, NativeProduct, address_of
from worker.model.hugepages import Arena
from worker.model.kvcache import LayerKv, LayerSpec

_MOST_GROUP = 8


@dataclass(frozen=True, slots=True)
class Runs:
    """Where KV of some sequences lies: sequence ``s`` owns runs ``first[s] .. first[s+1]``."""

    slots: Tensor
    """int64 ``[runs, 2]``: first slot and length."""
    first: Tensor
    """int64 ``[sequences + 1]``"""


class _Packed(ctypes.Structure):
    """``struct packed`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
    )


class CpuKernels:
    """Typed calls into the compiled libraries. Thread-safe; ``threads`` share a call's work."""

    def __init__(self, library: ctypes.CDLL, attention: ctypes.CDLL, threads: int) -> None:
        pointer, number, threaded = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._decode = attention.headwater_decode
        self._decode.argtypes = [
            *(pointer, number, pointer, pointer, number, number, pointer, pointer, pointer),
            *([number] * 5),
            *(ctypes.c_float, threaded),
        ]
        self._decode.restype = ctypes.c_int
        self.decode = address_of(self._decode)
        """Address of the kernel behind :meth:`attend`."""
        self._linear = library.headwater_linear
        self._linear.argtypes = [
            *(pointer, number, pointer, pointer, pointer),
            *(number, number, number, threaded, pointer, pointer),
        ]
        self._linear.restype = threaded
        self._packed = address_of(library.headwater_packed)
        self._pack = library.headwater_pack
        self._pack.argtypes, self._pack.restype = [pointer, pointer, number, number], None
        self._norm = library.headwater_norm
        self._norm.argtypes = [
            *(pointer, number, pointer, pointer, number, number),
            *(ctypes.c_float, ctypes.c_float),
        ]
        self._norm.restype = None
        self._store = library.headwater_store
        self._store.argtypes = [
            *(pointer, number, number, pointer, number, number, pointer),
            *([number] * 3),
        ]
        self._store.restype = None
        self._argmax = library.headwater_argmax
        self._argmax.argtypes = [pointer, number, number, number, pointer, pointer]
        self._argmax.restype = None
        library.headwater_panel.restype = number
        self._panel: int = library.headwater_panel()
        self._arena = Arena()
        self.threads = threads
        self.chunks: ChunkKernel | None = None
        """Serves chunks of prompts, where it is faster than torch."""

    def pack(self, weight: Tensor) -> Tensor:
        """``weight`` ``[outputs, inputs]``, float32, in the form that :meth:`linear` reads."""
        outputs, inputs = weight.shape
        plain = weight.contiguous()
        packed = self._arena.empty(-(-outputs // self._panel) * self._panel * inputs, torch.float32)
        self._pack(plain.data_ptr(), packed.data_ptr(), outputs, inputs)
        return packed

    def product(self, packed: Tensor, bias: Tensor | None, outputs: int) -> NativeProduct:
        """:meth:`linear` with these weights."""
        inputs = packed.numel() // (-(-outputs // self._panel) * self._panel)
        address = None if bias is None else bias.data_ptr()
        struct = _Packed(packed.data_ptr(), address, outputs, inputs)
        return NativeProduct(
            lambda x: self.linear(x, packed, bias, outputs),
            self._packed,
            ctypes.addressof(struct),
            outputs,
            (struct, packed, bias),
            lambda x: self.linear_largest(x, packed, bias, outputs),
        )

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """``x @ weight.T + bias``: ``[..., inputs]`` float32 to ``[..., outputs]``."""
        rows, out = _rows(x), torch.empty(*x.shape[:-1], outputs)
        self._linear(*self._product_of(rows, packed, bias, out), None, None)
        return out

    def linear_largest(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int
    ) -> tuple[Tensor, Largest]:
        """:meth:`linear` of ``x`` ``[rows, inputs]``, and :meth:`largest` of it, found on the way.

        Raises ``RuntimeError`` if there is no memory for it.
        """
        rows, out = _rows(x), torch.empty(len(x), outputs)
        best, where = (ctypes.c_float * len(x))(), (ctypes.c_int64 * len(x))()
        if self._linear(*self._product_of(rows, packed, bias, out), best, where):
            raise RuntimeError("no memory for a product")
        return out, (list(best), list(where))

    def _product_of(
        self, rows: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor
    ) -> tuple[int | None, ...]:
        """Arguments of the C functions."""
        return (
            rows.data_ptr(),
            rows.stride(0),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            len(rows),
            out.shape[-1],
            rows.shape[1],
            self.threads,
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension, float32."""
        rows = _rows(x)
        out = torch.empty(x.shape)
        self._norm(
            rows.data_ptr(),
            rows.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            *rows.shape,
            eps,
            offset,
        )
        return out

    def largest(self, x: Tensor) -> Largest:
        """Of each row of ``[rows, size]``, float32."""
        rows = _rows(x)
        count, size = rows.shape
        best, where = (ctypes.c_float * count)(), (ctypes.c_int64 * count)()
        self._argmax(rows.data_ptr(), rows.stride(0), count, size, best, where)
        return list(best), list(where)

    def store(self, layer: LayerKv, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """``layer.write`` for a few scattered slots ``[T]``, int64."""
        for cache, new in ((layer.keys, key), (layer.values, value)):
            part = new if new.stride(2) == 1 else new.contiguous()
            self._store(
                cache.data_ptr(),
                cache.stride(1),
                cache.stride(0),
                part.data_ptr(),
                part.stride(0),
                part.stride(1),
                slots.data_ptr(),
                len(slots),
                cache.shape[0],
                cache.shape[2],
            )

    @staticmethod
    def decodes(spec: LayerSpec, query_heads: int) -> bool:
        """Whether a layer's shapes are compiled in."""
        return ChunkKernel.takes(spec) and query_heads // spec.kv_heads <= _MOST_GROUP

    def attend(self, query: Tensor, layer: LayerKv, runs: Runs, out: Tensor, scale: float) -> None:
        """``query`` and ``out`` ``[n, Hq, D]``, each row in one piece; keys and values of a layer
        have the same strides, and each head of a slot is in one piece."""
        n, heads, dim = query.shape
        kv_heads = layer.keys.shape[0]
        if query.stride()[1:] != (dim, 1):
            query = query.contiguous()
        failed = self._decode(
            query.data_ptr(),
            query.stride(0),
            layer.keys.data_ptr(),
            layer.values.data_ptr(),
            layer.keys.stride(1),
            layer.keys.stride(0),
            runs.slots.data_ptr(),
            runs.first.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            n,
            kv_heads,
            heads // kv_heads,
            dim,
            scale,
            self.threads,
        )
        if failed:
            raise RuntimeError(f"the decode kernel does not take {heads} heads of {dim}")


def _rows(x: Tensor) -> Tensor:
    """``[rows, last dimension]``, each row in one piece."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def runs_of(tables: list[tuple[tuple[int, ...], int]], block_size: int, window: int | None) -> Runs:
    """Runs of consecutive slots of each sequence's ``(blocks, length)``, seen through a window."""
    used: list[int] = []
    counts, skipped, unused = [0], [], []
    for blocks, length in tables:
        begin = 0 if window is None else max(0, length - window)
        used += blocks[begin // block_size : -(-length // block_size)]
        counts.append(len(used))
        skipped.append(begin % block_size)
        unused.append(-length % block_size)
    block, own = np.array(used, dtype=np.int64), np.array(counts)
    follows = np.zeros(len(block), dtype=bool)
    follows[1:] = np.diff(block) == 1
    follows[own[:-1]] = False
    starts = np.flatnonzero(~follows)
    slots = np.empty((len(starts), 2), dtype=np.int64)
    slots[:, 0] = block[starts] * block_size
    slots[:, 1] = np.diff(starts, append=len(block)) * block_size
    first = np.searchsorted(starts, own)
    slots[first[1:] - 1, 1] -= unused
    slots[first[:-1], 0] += skipped
    slots[first[:-1], 1] -= skipped
    return Runs(torch.from_numpy(slots), torch.from_numpy(first))
