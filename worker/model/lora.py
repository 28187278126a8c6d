"""LoRA adapters on a model that many sequences share: ``y += scale * B(A x)`` on their rows only.

The base weights never change. A step without adapters runs the model as it is; for a step with
adapters the ``forward`` of the modules concerned is replaced while that step runs. Rows of one
adapter lie together (:func:`grouped`), so each adapter costs two small products per module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from worker.model.batch import StepBatch
from worker.runner import Chunk, StepPlan
from worker.sequence import SamplingParams

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_SURVEY_TOKENS = 7
_PRODUCT_TOLERANCE = 0.03
"""Relative; what int8 and bfloat16 stay under."""


@dataclass(frozen=True)
class LoraWeights(ReadAdapter):
    """An adapter whose shapes fit the model, on the model's device and in its type."""

    parts: dict[str, tuple[Tensor, Tensor]]
    """By module: ``A^T [in, r]`` and ``scale * B^T [r, out]``."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows ``start .. stop`` of what a module gets belong to one adapter."""

    adapter: str
    start: int
    stop: int


class _Target:
    """A linear module that adapters change, and its weights per adapter."""

    def __init__(self, module: nn.Module, rows: _Rows, *, head: bool) -> None:
        self.module, self.head = module, head
        self.parts: dict[str, tuple[Tensor, Tensor]] = {}
        self._rows = rows
        self._plain: Callable[..., Tensor] = module.forward
        self._own: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the module's own during a step with adapters."""
        out = self._plain(x, *args, **kwargs)
        rows_in, rows_out = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        for segment in self._rows.head if self.head else self._rows.body:
            pair = self.parts.get(segment.adapter)
            if pair is not None:
                part = slice(segment.start, segment.stop)
                rows_out[part].addmm_(rows_in[part] @ pair[0], pair[1])
        return out

    def put(self) -> None:
        """The module calls :meth:`forward` from now on."""
        self._own = self.module.__dict__.get("forward")
        self._plain = self.module.forward
        # past nn.Module.__setattr__, which takes as long as a small product
        self.module.__dict__["forward"] = self.forward

    def take_back(self) -> None:
        """The module calls what it called before."""
        if self._own is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._own


@dataclass(slots=True)
class _Rows:
    """Whose rows are whose in the step under way."""

    body: tuple[_Segment, ...] = ()
    head: tuple[_Segment, ...] = ()
    """The output layer gets only the rows that are kept."""


class LoraStore:
    """``worker.adapterstore.AdapterStore`` of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.max_rank = 64
        """Adapters beyond it are refused."""
        self._rows = _Rows()
        self._linear: dict[str, nn.Module] = {}
        """Modules that an adapter may change, by name; see :meth:`survey`."""
        self._head: str | None = None
        self._targets: dict[str, _Target] = {}
        self._installed: dict[str, LoraWeights] = {}

    def survey(self, forward: Callable[[StepPlan], Tensor], pool_tokens: int) -> None:
        """Find the linear modules through which each row of a step passes once, by looking.

        Others, such as experts that see some of the rows, cannot tell whose row they are given.
        Writes KV; call before anything is served.
        """
        count = min(_SURVEY_TOKENS, pool_tokens)
        blocks = tuple(range(count))  # enough for any block size
        chunk = Chunk("survey", 0, (0,) * count, blocks, sample=True, params=SamplingParams())
        seen: dict[str, list[int]] = {}
        head: Any = self._model.get_output_embeddings
        handles = [
            module.register_forward_pre_hook(_noting(seen.setdefault(name, [])))
            for name, module in self._model.named_modules()
            if _sizes(module) is not None
        ]
        try:
            with torch.inference_mode():
                forward(StepPlan((chunk,)))
        finally:
            for handle in handles:
                handle.remove()
        for name, rows in seen.items():
            module = self._model.get_submodule(name)
            if module is head():
                self._head = name
            if rows == ([1] if module is head() else [count]):
                self._linear[name] = module

    def read(self, folder: str) -> LoraWeights:
        """See :class:`worker.adapterstore.AdapterStore`."""
        files = read_folder(folder, self.max_rank)
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

    def install(self, scope: str, adapter: ReadAdapter) -> None:
        """See :class:`worker.adapterstore.AdapterStore`."""
        assert isinstance(adapter, LoraWeights)
        self._installed[scope] = adapter
        for name, pair in adapter.parts.items():
            target = self._targets.get(name)
            if target is None:
                target = _Target(self._linear[name], self._rows, head=name == self._head)
                self._targets[name] = target
            target.parts[scope] = pair

    def remove(self, scope: str) -> None:
        """See :class:`worker.adapterstore.AdapterStore`."""
        for name in self._installed.pop(scope).parts:
            target = self._targets[name]
            del target.parts[scope]
            if not target.parts:
                del self._targets[name]

    @contextmanager
    def applied(self, plan: StepPlan, batch: StepBatch) -> Iterator[None]:
        """The model's linear modules add what the chunks' adapters ask for.

        Raises ``ValueError`` for an adapter that is not installed.
        """
        body = _segments(plan)
        if not body:
            yield
            return
        wanted = {segment.adapter for segment in body}
        if missing := wanted - self._installed.keys():
            raise ValueError(f"adapters are not installed: {', '.join(sorted(missing))}")
        self._rows.body = body
        self.head_gets(batch.sampled_rows.tolist())
        targets = [t for t in self._targets.values() if not wanted.isdisjoint(t.parts)]
        for target in targets:
            target.put()
        try:
            yield
        finally:
            for target in targets:
                target.take_back()

    def head_gets(self, rows: Sequence[int]) -> None:
        """Within :meth:`applied`: which rows of the step (ascending) its next forward keeps."""
        if self._head in self._targets:
            self._rows.head = _sampled(self._rows.body, rows)

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
        sizes = _sizes(self._linear[name])
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


def grouped(plan: StepPlan) -> StepPlan:
    """The plan with chunks of one adapter side by side, in their order otherwise."""
    if not any(chunk.adapter for chunk in plan.chunks):
        return plan
    order: dict[str, list[Chunk]] = {}
    for chunk in plan.chunks:
        order.setdefault(chunk.adapter, []).append(chunk)
    return replace(plan, chunks=tuple(chunk for chunks in order.values() for chunk in chunks))


def _segments(plan: StepPlan) -> tuple[_Segment, ...]:
    """Runs of rows with the same adapter; rows without one belong to none."""
    found: list[_Segment] = []
    row = 0
    for chunk in plan.chunks:
        end = row + len(chunk.tokens)
        if chunk.adapter:
            if found and found[-1].stop == row and found[-1].adapter == chunk.adapter:
                found[-1] = replace(found[-1], stop=end)
            else:
                found.append(_Segment(chunk.adapter, row, end))
        row = end
    return tuple(found)


def _sampled(body: tuple[_Segment, ...], rows: Sequence[int]) -> tuple[_Segment, ...]:
    """The segments in terms of the rows that are kept (ascending)."""
    found: list[_Segment] = []
    for segment in body:
        inside = [i for i, row in enumerate(rows) if segment.start <= row < segment.stop]
        if inside:
            found.append(_Segment(segment.adapter, inside[0], inside[-1] + 1))
    return tuple(found)


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


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Features in and out of a linear module; None if it is none."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    n_in, n_out = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (n_in, n_out) if isinstance(n_in, int) and isinstance(n_out, int) else None


def _multiplies_as(module: nn.Module, weight: Tensor) -> bool:
    """Whether a layer without a readable weight has this one, as far as its precision tells."""
    if _sizes(module) != (weight.shape[-1], weight.shape[0]):
        return False
    rows = torch.linspace(-1, 1, 8 * weight.shape[-1], device=weight.device, dtype=weight.dtype)
    rows = rows.reshape(8, -1).sin()
    bias: Any = getattr(module, "bias", None)
    with torch.inference_mode():
        # past the instance, whose forward is another one while the engine runs a step
        got, wanted = type(module).forward(module, rows), functional.linear(rows, weight, bias)
    return float((got - wanted).norm()) <= _PRODUCT_TOLERANCE * float(wanted.norm())


def _noting(rows: list[int]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows.append(args[0].numel() // args[0].shape[-1])

    return note
