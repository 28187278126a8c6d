"""Memory for what is read in every step, in large pages where the system has them.

Weights and KV are far larger than the part of memory whose pages a processor remembers. With pages
of 4 KB it looks one up every 4 KB; on a virtual machine that can take a third of the time (ADR 9).
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

LARGE = 2 << 20
"""Bytes of a large page; less is not worth one."""
_PIECE = 32 << 20
_ALIGNED = 64
"""Bytes: a line of the cache."""


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As ``torch.empty`` on the CPU. The system is asked for large pages, and may decline.

    Raises ``RuntimeError`` where there is not so much memory.
    """
    size = prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.empty(shape, dtype=dtype)
    return _bytes(size).view(dtype).view(shape)


class Arena:
    """Tensors that stay, one behind the other, in the order in which they are read."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """``[size]``. Its memory is free once all tensors of its piece of the arena are."""
        wanted = size * dtype.itemsize
        taken = -(-wanted // _ALIGNED) * _ALIGNED
        if len(self._rest) < taken:
            self._rest = _bytes(max(_PIECE, taken))
        given, self._rest = self._rest[:wanted], self._rest[taken:]
        return given.view(dtype)


def _bytes(size: int) -> Tensor:
    """Untouched memory from the beginning of a large page on."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # torch says what it cannot get as callers expect
        return torch.empty(size, dtype=torch.uint8)
    with suppress(OSError):  # a kernel that knows none
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
    first = -raw.data_ptr() % LARGE
    return raw[first : first + size]
