"""A product that both Python and the worker's own C code can call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Largest = tuple[list[float], list[int]]
"""The largest value of each row and the first place it has; NaN if any value of the row is."""


@dataclass(frozen=True, slots=True)
class NativeProduct:
    """``x [..., in]`` to ``x @ w.T + bias``, ``[..., out]``, float32."""

    compute: Callable[[Tensor], Tensor]
    function: int
    """Address of a ``product`` of ``cpu_layer.c`` ..."""
    weights: int
    """... and of its weights."""
    outputs: int
    kept: object
    """What holds the memory of both."""
    with_largest: Callable[[Tensor], tuple[Tensor, Largest]] | None = None
    """The product of ``[rows, in]``, and the largest of each row found while it was computed."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return self.compute(x)


def first_largest(x: Tensor) -> Largest:
    """As torch finds it, of rows that are all numbers."""
    best = x.amax(-1)
    return best.tolist(), (x == best[:, None]).int().argmax(-1).tolist()


def address_of(function: object) -> int:
    """Of a C function of a loaded library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
