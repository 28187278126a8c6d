"""Modules of a model on a CPU, replaced by ones that call the worker's own kernels.

Linear layers keep their weights in the kernel's layout. Beside torch's ``linear`` the same float32
products take 0.4 to 0.9 of the time, least with the few rows of a decoding step (ADR 9). The
original weight is given up, so memory stays the same, except where an embedding shares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from worker.model.cpu_kernels import CpuKernels
from worker.model.sameinput import (
    Product,
    SharedProduct,
    SharingLinear,
    groups,
    joined_bias,
    widths_of,
)


class PackedLinear(SharingLinear):
    """A layer whose weight lies in the kernel's layout."""


def pack_linears(model: nn.Module, kernels: CpuKernels) -> int:
    """Replace every float32 ``nn.Linear`` under ``model``; returns how many there were."""
    replaced = 0
    with torch.inference_mode():
        for parent in list(model.modules()):
            plain = {n: c for n, c in parent.named_children() if _is_plain(c)}
            for names in groups({name: layer.in_features for name, layer in plain.items()}):
                layers = [plain[name] for name in names]
                shared = SharedProduct(_product(layers, kernels), widths_of(layers))
                for part, (name, layer) in enumerate(zip(names, layers, strict=True)):
                    setattr(parent, name, PackedLinear(shared, part, layer))
                replaced += len(names)
    return replaced


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.dtype == torch.float32


def _product(layers: Sequence[nn.Linear], kernels: CpuKernels) -> Product:
    packed = kernels.pack(torch.cat([layer.weight.detach() for layer in layers]))
    return kernels.product(packed, joined_bias(layers), sum(widths_of(layers)))


class KernelNorm(nn.Module):
    """Stands in for a root-mean-square norm."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float, offset: float, kernels: CpuKernels) -> None:
        super().__init__()
        self.register_parameter("weight", nn.Parameter(weight.detach(), requires_grad=False))
        self.eps, self.offset, self._kernels = eps, offset, kernels

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., size]`` to the same."""
        return self._kernels.norm(hidden_states, self.weight, self.eps, self.offset)


def replace_norms(model: nn.Module, kernels: CpuKernels) -> int:
    """Replace every norm under ``model`` that :class:`KernelNorm` computes alike, found by trying;
    returns how many there were."""
    replaced = 0
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                made = _norm_like(child, kernels) if "RMSNorm" in type(child).__name__ else None
                if made is not None:
                    setattr(parent, name, made)
                    replaced += 1
    return replaced


def _norm_like(plain: nn.Module, kernels: CpuKernels) -> KernelNorm | None:
    weight = getattr(plain, "weight", None)
    eps = getattr(plain, "variance_epsilon", getattr(plain, "eps", None))
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    if weight.dtype != torch.float32 or len(list(plain.parameters())) != 1:
        return None
    # rows of ordinary size, and so small that eps decides
    sizes = torch.tensor([1.0, eps**0.5, 30.0])[:, None]
    x = torch.linspace(-2, 3, 3 * len(weight)).reshape(3, -1).sin() * sizes
    wanted = plain(x)
    for offset in (0.0, 1.0):
        made = KernelNorm(weight, eps, offset, kernels)
        if torch.allclose(made(x), wanted, rtol=1e-5, atol=1e-6):
            return made
    return None
