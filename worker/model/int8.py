"""Linear layers on a CPU with int8 weights and activations (W8A8): ``[model] quantize = "int8"``.

Weights have one scale per output channel, activations one per token, found anew for each: a few
activations of a language model are a hundred times the others, and a scale shared by tokens would
round most of them to zero. Products are summed exactly in int32, so a row's result does not
depend on its batch. The worker's own kernel multiplies where it runs (``cpu_int8.py``), else
FBGEMM, else torch. Measured in ``docs/quantization.md``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from worker.model.cpu_int8 import LEVELS, Int8Kernel
from worker.model.support import Unsupported

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Siblings that are called one after the other with the same tensor: one product serves them."""
_LEVELS_NARROW = 63
"""Largest quantized activation where a CPU's byte products saturate at 16 bits."""
_TINY = 1e-30
"""In place of the peak of a row of zeros."""
_MOST_INPUTS = 65_536
"""Inputs beyond which a sum of products of bytes might not fit into 32 bits."""

Product = Callable[[Tensor], Tensor]
"""``x [..., in]`` to ``x @ w.T + bias``, ``[..., out]``; both float32."""


class Int8Linear(nn.Linear):
    """Stands in for an ``nn.Linear``; has no ``weight`` that could be read or trained."""

    def __init__(self, shared: SharedProduct, part: int, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)  # the shared product adds it
        self._shared, self._part = shared, part

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, maybe a view of a wider tensor."""
        return self._shared.of(input, self._part)


class SharedProduct:
    """The product of one or several layers that get the same input, computed for the first."""

    def __init__(self, layers: Sequence[nn.Linear], kernel: Int8Kernel | None = None) -> None:
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self._product = pack(weight.float(), _joined_bias(layers), kernel)
        self._widths = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

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
        if x.dtype == torch.float32:
            return self._product(x)
        return self._product(x.float()).to(x.dtype)


def pack(weight: Tensor, bias: Tensor | None, kernel: Int8Kernel | None = None) -> Product:
    """Quantize ``weight`` ``[out, in]`` and lay it out for the fastest product there is."""
    scales = weight.abs().amax(1).clamp_min(_TINY) / LEVELS
    quantized = (weight / scales[:, None]).round().to(torch.int8)
    if kernel is not None:
        return partial(kernel.linear, packed=kernel.pack(quantized, scales, bias))
    levels = _fbgemm_levels()
    made = _fbgemm(quantized, scales, levels) if levels else _portable(quantized, scales)
    return partial(_scaled, made, bias)


def _scaled(product: Product, bias: Tensor | None, x: Tensor) -> Tensor:
    """``product``, which takes rows within -1 .. 1, for any rows."""
    peak = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
    out = product(x / peak).mul_(peak)
    return out if bias is None else out.add_(bias)


def _fbgemm(quantized: Tensor, scales: Tensor, levels: int) -> Product:
    """Weights in FBGEMM's layout; x86 only. It quantizes activations itself, as unsigned bytes."""
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with _engine("fbgemm"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop these tensors: _fbgemm_levels asks
        weight = torch._make_per_channel_quantized_tensor(quantized, scales.double(), zeros, 0)
        packed = torch.ops.quantized.linear_prepack(weight, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    step, middle = 1 / levels, levels + 1

    def product(x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], len(scales))
        out: Tensor = multiply(x, step, middle, packed)
        return out

    return product


def _portable(quantized: Tensor, scales: Tensor) -> Product:
    """torch's own int8 product, which every CPU has."""
    transposed = quantized.t()  # a view: a copy is slower
    steps = scales / LEVELS

    def product(x: Tensor) -> Tensor:
        rows = (x.reshape(-1, x.shape[-1]) * LEVELS).round_().to(torch.int8)
        if not len(rows):
            return x.new_empty(*x.shape[:-1], len(scales))
        return (torch._int_mm(rows, transposed) * steps).reshape(*x.shape[:-1], -1)

    return product


@cache
def _fbgemm_levels() -> int:
    """Largest activation that FBGEMM multiplies exactly here, found by trying; 0 without FBGEMM.

    A CPU without VNNI sums pairs of byte products in 16 bits, which takes narrower activations.
    """
    size = 64
    ones = torch.ones(1, size)
    extreme = torch.full((size, size), LEVELS, dtype=torch.int8)
    for levels in (LEVELS, _LEVELS_NARROW):
        try:
            sums = _fbgemm(extreme, torch.ones(size), levels)(ones)
        except (AttributeError, RuntimeError):  # no x86, or a torch without it
            return 0
        if bool((sums - size * LEVELS).abs().max() < 1):
            return levels
    return 0


@contextmanager
def _engine(name: str) -> Iterator[None]:
    """torch packs for the engine that is chosen at that moment."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [
            torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float()
            for layer in layers
        ]
    )


def quantize_linears(model: nn.Module, kernel: Int8Kernel | None = None) -> int:
    """Replace every linear layer under ``model``; returns how many there were.

    Raises ``Unsupported`` if there are none and, before anything is changed, if the model keeps
    weights elsewhere.
    """
    check_covered(model)
    replaced = 0
    with torch.inference_mode():
        for parent in list(model.modules()):
            children = {n: c for n, c in parent.named_children() if _is_linear(c)}
            for names in _groups(children):
                layers = [_as_linear(children[name]) for name in names]
                for name, layer in zip(names, _quantized(layers, kernel), strict=True):
                    setattr(parent, name, layer)
                replaced += len(names)
    if not replaced:
        raise Unsupported("int8 covers plain linear layers only, and there are none")
    return replaced


def check_covered(model: nn.Module) -> None:
    """Raise ``Unsupported`` for a model whose weights are not all in plain linear layers."""
    kinds: set[str] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        if not _is_linear(module):
            wide = [n for n, p in module.named_parameters(recurse=False) if p.ndim > 1]
            kinds.update(f"{type(module).__name__}.{name}" for name in wide)
        elif _as_linear(module).in_features > _MOST_INPUTS:
            raise Unsupported(f"int8 takes layers of at most {_MOST_INPUTS} inputs")
    if kinds:
        found = ", ".join(sorted(kinds))
        raise Unsupported(f"int8 covers plain linear layers only, and there is {found}")


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Conv1D)


def _as_linear(module: nn.Module) -> nn.Linear:
    """A ``Conv1D`` is a linear layer with its weight transposed; no memory is copied."""
    if isinstance(module, nn.Linear):
        return module
    linear = nn.Linear(*module.weight.shape, bias=False, device="meta")  # type: ignore[misc]
    linear.weight = nn.Parameter(module.weight.detach().t(), requires_grad=False)  # type: ignore[operator]
    linear.bias = module.bias  # type: ignore[assignment]
    return linear


def _groups(children: dict[str, nn.Module]) -> list[tuple[str, ...]]:
    """Names by shared product: those known to get the same input together, the others alone."""
    together = [
        names
        for names in SAME_INPUT
        if all(name in children for name in names)
        and len({_as_linear(children[name]).in_features for name in names}) == 1
    ]
    taken = {name for names in together for name in names}
    return [*together, *((name,) for name in children if name not in taken)]


def _quantized(layers: Sequence[nn.Linear], kernel: Int8Kernel | None) -> Iterator[Int8Linear]:
    shared = SharedProduct(layers, kernel)
    for part, layer in enumerate(layers):
        yield Int8Linear(shared, part, layer)
