"""LoRA adapters as files: read, checked against the model, made ready to be applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from worker.adapterfiles import AdapterRefused, LoraSpec, read_folder
from worker.adapterstore import ReadAdapter

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_PRODUCT_TOLERANCE = 0.03
"""Relative; what int8 and bfloat16 stay under."""


@dataclass(frozen=True)
class LoraWeights(ReadAdapter):
    """An adapter whose shapes fit the model, on the model's device and in its type."""

    parts: dict[str, tuple[Tensor, Tensor]]
    """By module: ``A^T [in, r]`` and ``scale * B^T [r, out]``."""


class LoraReader:
    """Reads adapters of one model.

    :param linear: modules that an adapter may change, by name.
    :param head: name of the output layer among the model's modules, if known.
    """

    def __init__(
        self, model: PreTrainedModel, linear: Mapping[str, nn.Module], head: str | None
    ) -> None:
        self._model, self._linear, self._head = model, linear, head

    def read(self, folder: str, max_rank: int) -> LoraWeights:
        """An adapter that fits. Raises ``AdapterRefused``."""
        files = read_folder(folder, max_rank)
        try:
            tensors = safetensors.torch.load(files.weights)
        except (SafetensorError, ValueError, KeyError) as error:
            raise AdapterRefused(f"its weights cannot be read: {error}") from None
        pairs = _pairs(self._without_own(tensors))
        self._check_targets(files.spec, set(pairs))
        parts = {name: self._fitted(files.spec, name, *pair) for name, pair in pairs.items()}
        return LoraWeights(
            revision=files.revision,
            rank=max(a.shape[1] for a, _ in parts.values()),
            n_bytes=sum(t.nbytes for pair in parts.values() for t in pair),
            base=files.spec.base_model_name_or_path or "",
            parts=parts,
        )

    def _without_own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without copies of the model's own embeddings, which PEFT saves beside an adapted head."""
        kept: dict[str, Tensor] = {}
        own = dict(self._model.named_parameters())
        for key, tensor in tensors.items():
            name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
            weight, module = own.get(name), self._linear.get(name.removesuffix(".weight"))
            if weight is not None:
                same = torch.equal(tensor.to(weight.device, weight.dtype), weight)
            elif module is not None:  # its weight is packed or quantized: only products tell
                same = _multiplies_as(module, tensor.to(self._model.device, self._model.dtype))
            else:
                kept[key] = tensor
                continue
            if not same:
                raise AdapterRefused(f"it changes a weight of the model itself: {key!r}")
        return kept

    def _check_targets(self, spec: LoraSpec, given: set[str]) -> None:
        """Weights and ``target_modules`` must speak of the same modules."""
        if strange := sorted(given - self._linear.keys()):
            raise AdapterRefused(
                f"it changes {strange[0]!r}, which is no linear module of this model"
            )
        targets = spec.targets(self._linear, self._head)
        if extra := sorted(given - targets):
            raise AdapterRefused(f"it has weights for {extra[0]!r}, which it does not target")
        if missing := sorted(targets - given):
            raise AdapterRefused(f"it targets {missing[0]!r} and has no weights for it")
        if not given:
            raise AdapterRefused("it changes no module of this model")

    def _fitted(self, spec: LoraSpec, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in the form in which they are applied. Raises ``AdapterRefused`` by shape."""
        sizes = sizes_of(self._linear[name])
        assert sizes is not None
        n_in, n_out = sizes
        rank = spec.rank(name)
        if a.shape != (rank, n_in) or b.shape != (n_out, rank):
            raise AdapterRefused(
                f"at {name!r} its weights are {tuple(a.shape)} and {tuple(b.shape)}; "
                f"rank {rank} on this model needs ({rank}, {n_in}) and ({n_out}, {rank})"
            )
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterRefused(f"at {name!r} its weights are not all numbers")
        device, dtype = self._model.device, self._model.dtype
        precise = torch.promote_types(b.dtype, torch.float32)
        scaled = (b.to(precise) * spec.scale(name)).to(device, dtype)
        return a.to(device, dtype).t().contiguous(), scaled.t().contiguous()


def _pairs(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """``lora_A`` and ``lora_B`` by module. Raises ``AdapterRefused`` for anything else."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind = _A if key.endswith(_A) else _B
        if not key.startswith(_PREFIX) or not key.endswith(kind) or tensor.dim() != 2:
            raise AdapterRefused(f"it has weights that are no LoRA of a linear module: {key!r}")
        if not tensor.is_floating_point():
            raise AdapterRefused(f"its weights {key!r} are of type {tensor.dtype}")
        found.setdefault(key.removeprefix(_PREFIX).removesuffix(kind), {})[kind] = tensor
    for name, pair in found.items():
        if len(pair) != 2:
            raise AdapterRefused(f"at {name!r} one of lora_A and lora_B is missing")
    return {name: (pair[_A], pair[_B]) for name, pair in found.items()}


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Features in and out of a linear module; None if it is none."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    n_in, n_out = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (n_in, n_out) if isinstance(n_in, int) and isinstance(n_out, int) else None


def _multiplies_as(module: nn.Module, weight: Tensor) -> bool:
    """Whether a layer without a readable weight has this one, as far as its precision tells."""
    if sizes_of(module) != (weight.shape[-1], weight.shape[0]):
        return False
    rows = torch.linspace(-1, 1, 8 * weight.shape[-1], device=weight.device, dtype=weight.dtype)
    rows = rows.reshape(8, -1).sin()
    bias: Any = getattr(module, "bias", None)
    with torch.inference_mode():
        # past the instance, whose forward is another one while the engine runs a step
        got, wanted = type(module).forward(module, rows), functional.linear(rows, weight, bias)
    return float((got - wanted).norm()) <= _PRODUCT_TOLERANCE * float(wanted.norm())
