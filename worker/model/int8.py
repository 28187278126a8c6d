"""Linear layers on a CPU with int8 weights and activations (W8A8): ``[model] quantize = "int8"``.

Weights have one scale per output channel, activations one per token, found anew for each: a few
activations of a language model are a hundred times the others, and a scale shared by tokens would
round most of them to zero. Products are summed exactly in int32, so a row's result does not
depend on its batch. The worker's own kernel multiplies where it runs (``cpu_int8.py``), else
FBGEMM, else torch. Measured in ``docs/quantization.md``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from worker.model.cpu_int8 import LEVELS, Int8Kernel
from worker.model.cpu_native import NativeProduct
from worker.model.sameinput import (
    Product,
    SharedProduct,
    SharingLinear,
    groups,
    joined_bias,
    widths_of,
)
from worker.model.support import Unsupported

_LEVELS_NARROW = 63
"""Largest quantized activation where a CPU's byte products saturate at 16 bits."""
_TINY = 1e-30
"""In place of the peak of a row of zeros."""
_MOST_INPUTS = 65_536
"""Inputs beyond which a sum of products of bytes might not fit into 32 bits."""


class Int8Linear(SharingLinear):
    """A quantized layer."""


def shared_product(layers: Sequence[nn.Linear], kernel: Int8Kernel | None = None) -> SharedProduct:
    """The quantized product of layers that get the same input, for activations of any type."""
    weight = torch.cat([layer.weight.detach() for layer in layers]).float()
    product = pack(weight, joined_bias(layers), kernel)

    def compute(x: Tensor) -> Tensor:
        return product(x) if x.dtype == torch.float32 else product(x.float()).to(x.dtype)

    whole = replace(product, compute=compute) if isinstance(product, NativeProduct) else compute
    return SharedProduct(whole, widths_of(layers))


def pack(weight: Tensor, bias: Tensor | None, kernel: Int8Kernel | None = None) -> Product:
    """Quantize ``weight`` ``[out, in]`` and lay it out for the fastest product there is."""
    scales = weight.abs().amax(1).clamp_min(_TINY) / LEVELS
    quantized = (weight / scales[:, None]).round().to(torch.int8)
    if kernel is not None:
        return kernel.product(quantized, scales, bias)
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
            sizes = {name: _as_linear(child).in_features for name, child in children.items()}
            for names in groups(sizes):
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


def _quantized(layers: Sequence[nn.Linear], kernel: Int8Kernel | None) -> Iterator[Int8Linear]:
    shared = shared_product(layers, kernel)
    for part, layer in enumerate(layers):
        yield Int8Linear(shared, part, layer)
