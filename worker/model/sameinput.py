"""Linear layers that get the same input, served by one product: a wide one is faster than several.

Which layers these are is known by name. It is not relied on: a layer that is called with another
input than its siblings, or twice, has the product computed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Siblings that are called one after the other with the same tensor."""

Product = Callable[[Tensor], Tensor]
"""``x [..., in]`` to ``x @ w.T + bias``, ``[..., out]``."""


class SharedProduct:
    """The product of one or several layers, ``widths`` outputs each, computed for the first."""

    def __init__(self, product: Product, widths: Sequence[int]) -> None:
        self.product = product
        self._widths = list(widths)
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    @property
    def parts(self) -> int:
        """Layers."""
        return len(self._widths)

    def of(self, x: Tensor, part: int) -> Tensor:
        """Output of layer ``part`` for ``x``; the caller may change it."""
        if len(self._widths) == 1:
            return self._compute(x)
        if x is not self._input or self._outputs[part] is None:
            self._input, self._outputs = x, [*self._compute(x).split_with_sizes(self._widths, -1)]
        output = self._outputs[part]
        assert output is not None
        self._outputs[part] = None  # handed out once: it may be changed in place
        if not any(rest is not None for rest in self._outputs):
            self._input = None
        return output

    def _compute(self, x: Tensor) -> Tensor:
        return self.product(x)


class SharingLinear(nn.Linear):
    """Stands in for an ``nn.Linear``; has no ``weight`` that could be read or trained."""

    def __init__(self, shared: SharedProduct, part: int, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)  # the shared product adds it
        self.shared, self._part = shared, part

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, maybe a view of a wider tensor."""
        return self.shared.of(input, self._part)


def groups(in_features: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Names of a module's linear layers by shared product, from their sizes; most stand alone."""
    together = [
        names
        for names in SAME_INPUT
        if all(name in in_features for name in names)
        and len({in_features[name] for name in names}) == 1
    ]
    taken = {name for names in together for name in names}
    return [*together, *((name,) for name in in_features if name not in taken)]


def joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    """Biases of all layers, float32, zeros for those without; None if none has one."""
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [
            torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float()
            for layer in layers
        ]
    )


def widths_of(layers: Iterable[nn.Linear]) -> list[int]:
    """Outputs of each layer."""
    return [layer.out_features for layer in layers]
