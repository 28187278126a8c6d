"""The worker's int8 products for CPUs: ``cpu_int8.c``, compiled and loaded as ``cpu_kernels.c``.

One call rounds the rows of float32, each with its own scale, multiplies, and scales back: torch
needs several for that, which take longer than the product of a decoding step. It needs AVX512-VNNI
or AVX2; elsewhere FBGEMM or torch's own int8 product serves (``int8.py``).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from worker.model.cpu_compile import NoCpuKernels, open_library
from worker.model.cpu_native import NativeProduct, address_of
from worker.model.hugepages import Arena

_SOURCE = Path(__file__).with_name("cpu_int8.c")
LEVELS = 127
"""Largest quantized weight and activation."""


class _Layer(ctypes.Structure):
    """``struct layer`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "offsets", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
    )


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """A layer's weights as the kernel reads them."""

    layer: _Layer
    address: int
    """Of ``layer``."""
    outputs: int
    arrays: tuple[Tensor, ...]
    """What it points to."""


class Int8Kernel:
    """Typed calls into the compiled library. Thread-safe; ``threads`` share the work of a call."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        pointer, number, threaded = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._linear = library.headwater_int8_linear
        self._linear.argtypes = [pointer, pointer, number, pointer, number, threaded]
        self._linear.restype = threaded
        self._pack = library.headwater_int8_pack
        self._pack.argtypes, self._pack.restype = [*([pointer] * 3), number, number], None
        library.headwater_int8_panel.restype = number
        self._panel: int = library.headwater_int8_panel()
        self._function = address_of(self._linear)
        self._threads = threads
        self._arena = Arena()

    def pack(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> PackedInt8:
        """``weight`` int8 ``[outputs, inputs]``; ``scales`` and ``bias`` float32 ``[outputs]``."""
        outputs, inputs = weight.shape
        plain = weight.contiguous()
        width = -(-outputs // self._panel) * self._panel
        packed = self._arena.empty(width * (-(-inputs // 4) * 4), torch.int8).zero_()
        offsets = torch.zeros(width, dtype=torch.int32)
        padded = torch.zeros(2, width)
        padded[0, :outputs] = scales
        if bias is not None:
            padded[1, :outputs] = bias
        self._pack(plain.data_ptr(), packed.data_ptr(), offsets.data_ptr(), outputs, inputs)
        arrays = (packed, offsets, padded[0], padded[1])
        layer = _Layer(*(array.data_ptr() for array in arrays), outputs, inputs)
        return PackedInt8(layer, ctypes.addressof(layer), outputs, arrays)

    def product(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> NativeProduct:
        """:meth:`linear` with these weights."""
        packed = self.pack(weight, scales, bias)
        return NativeProduct(
            lambda x: self.linear(x, packed),
            self._function,
            packed.address,
            packed.outputs,
            (self, packed),
        )

    def linear(self, x: Tensor, packed: PackedInt8) -> Tensor:
        """``[..., inputs]`` float32, rounded, by the weights: ``[..., outputs]`` float32."""
        inputs = x.shape[-1]
        rows = x.reshape(-1, inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        count = rows.shape[0]
        out = torch.empty(*x.shape[:-1], packed.outputs)
        address, stride = rows.data_ptr(), rows.stride(0)
        if self._linear(packed.address, address, stride, out.data_ptr(), count, self._threads):
            raise RuntimeError(f"no memory to round {count} rows")
        return out


def load_int8_kernel(folder: Path, threads: int) -> Int8Kernel:
    """Compile unless ``folder`` has it, load, compare with integers. Raises ``NoCpuKernels``."""
    library = open_library(_SOURCE, folder)
    if not library.headwater_int8_possible():
        raise NoCpuKernels("this CPU has neither AVX512-VNNI nor AVX2")
    kernel = Int8Kernel(library, threads)
    _check(kernel)
    return kernel


def _check(kernel: Int8Kernel) -> None:
    """Raises ``NoCpuKernels`` unless sums of whole numbers come out exactly."""
    random = torch.Generator().manual_seed(7)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-LEVELS, LEVELS + 1, shape, generator=random)

    for rows, inputs, outputs in ((1, 40, 64), (2, 33, 70), (6, 64, 129), (13, 20, 16), (95, 9, 3)):
        x, weight, bias = whole(rows, inputs), whole(outputs, inputs), whole(outputs)
        x[:, 0] = LEVELS  # the peak: so the step of a row is its `unit`
        unit = 2.0 ** (torch.arange(rows) % 5)[:, None]
        rounded_off = torch.rand(rows, inputs, generator=random) * 0.8 - 0.4
        given = (x + rounded_off).clamp(-LEVELS, LEVELS) * unit
        given[:, 0] = LEVELS * unit[:, 0]
        scales = torch.randint(1, 4, (outputs,), generator=random).float()
        for b in (None, bias):
            wanted = (x @ weight.t()) * scales * unit + (0 if b is None else b)
            packed = kernel.pack(weight.to(torch.int8), scales, b)
            if not torch.equal(kernel.linear(given, packed), wanted):
                raise NoCpuKernels(f"an int8 product of {rows} rows differs from integers'")
