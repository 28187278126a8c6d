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

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from worker.adapterstore import ReadAdapter
from worker.model.batch import StepBatch
from worker.model.loraread import LoraReader, LoraWeights, sizes_of
from worker.runner import Chunk, StepPlan
from worker.sequence import SamplingParams

_SURVEY_TOKENS = 7


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
            if sizes_of(module) is not None
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
        return LoraReader(self._model, self._linear, self._head).read(folder, self.max_rank)

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


def _noting(rows: list[int]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows.append(args[0].numel() // args[0].shape[-1])

    return note
