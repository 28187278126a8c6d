"""What an attention kernel has to offer. To add one: a file beside this, a line in ``choose``.

A kernel computes causal attention of one packed step against the paged KV pool, after the step's
own keys and values were written there. The layer's window is its business, a soft cap is not: a
model with capped layers never gets a kernel. Without a kernel, ``worker.model.attention`` computes
each sequence by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.model.kvcache import KvPool, LayerKv


@dataclass(frozen=True, slots=True)
class Chunked:
    """One chunk of the step: rows ``row .. row+length`` are positions ``start .. start+length``."""

    row: int
    length: int
    start: int
    blocks: tuple[int, ...]
    """Blocks of positions ``0 .. start+length``, as many as they need."""
    first_slot: int | None
    """Slot of position 0 if the blocks follow one another, else None."""

    @property
    def end(self) -> int:
        """Tokens of the sequence once this step is done."""
        return self.start + self.length


class Attend(Protocol):
    """Attention of one step, laid out on the device; called once per layer."""

    def __call__(self, query: Tensor, layer: LayerKv, scale: float) -> Tensor:
        """``query`` ``[Hq, T, D]``; returns ``[T, Hq, Dv]``."""
        ...


class StaticAttend(Attend, Protocol):
    """Attention of decode steps whose tensors never move, so that a recorded step can be replayed.

    Every query is one row. Rows past the chunks it was filled with read the pool's spare block.
    """

    def fill(self, chunks: Sequence[Chunked]) -> None:
        """Lay out the next step: at most as many chunks as there are rows, each of length 1."""
        ...


class Kernel(Protocol):
    """A way to compute attention on one kind of device."""

    @property
    def name(self) -> str:
        """What logs and measurements call it."""
        ...

    @property
    def any_blocks(self) -> bool:
        """Whether it reads blocks wherever they lie; otherwise scattered ones are copied first."""
        ...

    def refusal(self, device: torch.device, layers: Sequence[LayerKv], block_size: int) -> str:
        """Why it cannot serve these layers there, seen without running it; empty if it may."""
        ...

    def prepare(self, chunks: Sequence[Chunked], pool: KvPool, device: torch.device) -> Attend:
        """Lay out one step."""
        ...

    def static(
        self, pool: KvPool, device: torch.device, rows: int, longest: int, *, in_place: bool
    ) -> StaticAttend:
        """Tensors for decode steps of up to ``rows`` sequences of up to ``longest`` tokens.

        ``in_place``: blocks of each sequence follow one another, or ``any_blocks``.
        """
        ...


def half_precision_refusal(
    device: torch.device, layers: Sequence[LayerKv], most_dim: int = 256
) -> str:
    """What every flash kernel asks of device and layers; empty if they are fine."""
    if device.type != "cuda":
        return f"is for CUDA, not {device.type}"
    for layer in layers:
        spec = layer.spec
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"takes half precision, not {spec.dtype}"
        if spec.capped:
            return "has no soft cap"
        if spec.key_dim != spec.value_dim or spec.key_dim > most_dim or spec.key_dim % 8:
            return f"takes equal head sizes up to {most_dim} in steps of 8, not {spec.key_dim}"
    return ""


def int32(values: Sequence[int], device: torch.device) -> Tensor:
    """A vector of indices as flash kernels want them."""
    return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)
