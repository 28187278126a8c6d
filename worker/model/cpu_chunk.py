"""Attention of a chunk of a prompt on a CPU: ``cpu_chunk.c``, compiled by ``cpu_compile.py``.

torch's kernel for CPUs needs two calls and a merge for a chunk behind cached tokens, repeats keys
for the new part, and works on 32 rows at a time where a warm prompt has a few hundred (ADR 9).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from worker.model.cpu_native import address_of
from worker.model.kvcache import LayerKv, LayerSpec

_LANE, _MOST_DIM = 16, 256


class ChunkKernel:
    """Typed calls into the compiled library. Thread-safe; ``threads`` share the work of a call."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        pointer, number, threaded = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._attend = library.headwater_chunk
        self._attend.argtypes = [
            *(pointer, number, number, pointer, pointer, number, number, pointer, number),
            *(pointer, number, number),
            *([number] * 6),
            *(ctypes.c_float, threaded),
        ]
        self._attend.restype = threaded
        self.function = address_of(self._attend)
        """Address of the kernel, for C code."""
        self.pays = bool(library.headwater_chunk_pays())
        """Whether it is faster than torch's kernel on this CPU."""
        self._threads = threads

    @staticmethod
    def takes(spec: LayerSpec) -> bool:
        """Whether a layer's shapes are compiled in, here and in the kernel for decodes."""
        return (
            spec.dtype == torch.float32
            and spec.key_dim == spec.value_dim <= _MOST_DIM
            and spec.key_dim % _LANE == 0
            and not spec.capped
        )

    def attend(
        self,
        query: Tensor,
        layer: LayerKv,
        slots: slice | Tensor,
        start: int,
        out: Tensor,
        scale: float,
    ) -> None:
        """``query`` and ``out`` ``[n, Hq, D]`` of positions ``start .. start+n``, each of which
        sees itself and what is before it, through the layer's window.

        Each head of a row, and of a slot, is in one piece; keys and values of a layer have the
        same strides.

        :param slots: where KV of positions ``0 .. start+n`` lies.
        """
        n, heads, dim = query.shape
        if query.stride(2) != 1:
            query = query.contiguous()
        kv_heads = layer.keys.shape[0]
        failed = self._attend(
            query.data_ptr(),
            *query.stride()[:2],
            layer.keys.data_ptr(),
            layer.values.data_ptr(),
            layer.keys.stride(1),
            layer.keys.stride(0),
            None if isinstance(slots, slice) else slots.data_ptr(),
            slots.start if isinstance(slots, slice) else 0,
            out.data_ptr(),
            *out.stride()[:2],
            n,
            start,
            layer.spec.window or 0,
            kv_heads,
            heads // kv_heads,
            dim,
            scale,
            self._threads,
        )
        if failed:
            raise RuntimeError(f"no memory for the attention of {n} rows of {heads} x {dim}")
