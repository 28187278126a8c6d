"""The model's forward through ``torch.compile``, with paged attention as one opaque operator.

The operator hides the batch from the compiler, so a step of another layout is not another program.
What is compiled depends on whether one or several tokens and rows are there: a handful of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import PreTrainedModel

from worker.model.attention import ATTENTION, paged_attention
from worker.model.batch import Layout, StepBatch, build_batch
from worker.model.kvcache import KvPool, LayerSpec
from worker.runner import Chunk, StepPlan
from worker.sequence import SamplingParams

_NUMBER = "headwater_layer"


class _Now:
    """What the operator works on. The engine runs one step at a time, on one thread."""

    batch: StepBatch | None = None
    layers: tuple[nn.Module, ...] = ()


@torch.library.custom_op("headwater::paged_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float, softcap: float
) -> Tensor:
    assert _Now.batch is not None
    cap = softcap or None
    module = _Now.layers[layer]
    return paged_attention(module, query, key, value, None, scaling, cap, paged=_Now.batch)[0]


@_attend.register_fake
def _shape_of(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float, softcap: float
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **context: Any,
) -> tuple[Tensor, None]:
    if "paged" in context:  # a model beside it that is not compiled
        return paged_attention(module, query, key, value, None, scaling, softcap, **context)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    number: int = getattr(module, _NUMBER)
    return _attend(query, key, value, number, scale, softcap or 0.0), None


class CompiledForward:
    """Logits ``[S, V]`` of a batch. Compiles at the first call of each kind.

    ``backend``: what torch.compile makes of the traced programs.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Iterable[nn.Module], backend: str = "inductor"
    ) -> None:
        self._model, self._layers = model, tuple(layers)
        for number, layer in enumerate(self._layers):
            setattr(layer, _NUMBER, number)
        forward: Callable[..., Any] = model.forward
        self._forward = torch.compile(forward, dynamic=True, backend=backend)

    def __call__(self, batch: StepBatch) -> Tensor:
        _Now.batch, _Now.layers = batch, self._layers
        try:
            out = self._forward(
                input_ids=batch.ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.sampled_rows,
            )
        finally:
            _Now.batch = None
        logits: Tensor = out.logits[0]
        return logits

    def warm_up(self, specs: Mapping[nn.Module, LayerSpec], device: torch.device) -> None:
        """Compile every kind of step now, so that no request waits for it.

        Raises ``RuntimeError`` if the compiler cannot do it.
        """
        self._model.set_attn_implementation(ATTENTION)
        AttentionInterface.register(ATTENTION, _attention)
        pool, layout = KvPool(specs, 2, 2, device), Layout(device)
        with torch.inference_mode():
            for lengths, sampled in _KINDS:
                chunks = [
                    Chunk(f"warm-up {i}", 0, (0,) * length, (i,), sample, SamplingParams())
                    for i, (length, sample) in enumerate(zip(lengths, sampled, strict=True))
                ]
                self(build_batch(StepPlan(tuple(chunks)), pool, layout))


_KINDS = (
    ((1,), (True,)),
    ((1,), (False,)),
    ((2,), (True,)),
    ((2,), (False,)),
    ((1, 1), (True, True)),
    ((1, 2), (True, True)),
    ((1, 2), (True, False)),
)
"""Tokens and whether they sample, per chunk: compiled programs tell none, one and several apart."""
