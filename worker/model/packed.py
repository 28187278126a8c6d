"""Linear layers on a CPU with their weights in oneDNN's blocked layout.

torch's own ``linear`` hands a row-major weight to MKL for every call. With the weight reordered
once, at load, the same float32 products take 0.4 to 0.9 of the time (ADR 8): most at 2 to 64 rows,
which is what a batch of decodes and a short prefill are. The original weight is given up, so memory
stays the same, except where an embedding shares it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.model.support import Unsupported

LEAST_ROWS = 4
"""Fewer rows than this are slower than this many: a step is padded to it."""

_LAYOUT_ROWS = 512
"""Rows that oneDNN is told to expect when it chooses the layout; it is good for fewer as well."""
_PACKABLE = (torch.float32, torch.bfloat16)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class PackedLinear(nn.Linear):
    """Stands in for an ``nn.Linear``; has no ``weight`` that could be read or trained."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.register_parameter("weight", None)
        self.bias = plain.bias
        self.dtype = plain.weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), _LAYOUT_ROWS)

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self._packed, self.bias, "none", [], ""
        )
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of ``dtype`` and computes with them, by trying."""
    if device.type != "cpu" or dtype not in _PACKABLE:
        return False
    plain = nn.Linear(32, 16, dtype=dtype)
    try:
        with torch.inference_mode():
            _pack(plain)
    except (RuntimeError, AttributeError, NotImplementedError, Unsupported):
        return False
    return True


def pack_linears(model: nn.Module) -> int:
    """Replace every plain ``nn.Linear`` under ``model``; returns how many there were.

    Each is compared with what it replaces. Raises ``Unsupported`` if one differs.
    """
    replaced = 0
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and child.weight.dtype in _PACKABLE:
                    setattr(parent, name, _pack(child))
                    replaced += 1
    return replaced


def _pack(plain: nn.Linear) -> PackedLinear:
    packed = PackedLinear(plain)
    rows = torch.linspace(-1, 1, LEAST_ROWS * plain.in_features, dtype=plain.weight.dtype)
    rows = rows.reshape(LEAST_ROWS, -1)
    wanted, got = functional.linear(rows, plain.weight, plain.bias), packed(rows)
    scale = float(wanted.abs().max())
    if not float((got - wanted).abs().max()) <= _TOLERANCE[plain.weight.dtype] * max(scale, 1e-6):
        raise Unsupported("a layer with packed weights differs from the plain one")
    return packed
