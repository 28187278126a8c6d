"""Linear layers on a CPU with their weights in the layout of the worker's own kernel.

Beside torch's ``linear`` the same float32 products take 0.4 to 0.9 of the time, least with the few
rows of a decoding step (ADR 9). The original weight is given up, so memory stays the same, except
where an embedding shares it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worker.model.cpu_kernels import CpuKernels


class PackedLinear(nn.Linear):
    """Stands in for an ``nn.Linear``; has no ``weight`` that could be read or trained."""

    def __init__(self, plain: nn.Linear, kernels: CpuKernels) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.register_parameter("weight", None)
        self.bias = plain.bias
        self._kernels, self._packed = kernels, kernels.pack(plain.weight.detach())

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return self._kernels.linear(input, self._packed, self.bias, self.out_features)


def pack_linears(model: nn.Module, kernels: CpuKernels) -> int:
    """Replace every float32 ``nn.Linear`` under ``model``; returns how many there were."""
    replaced = 0
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                    setattr(parent, name, PackedLinear(child, kernels))
                    replaced += 1
    return replaced
