"""Decode steps of fixed form: their tensors never move, so a step is recorded once and replayed.

On CUDA the recording is a graph: one launch in place of hundreds, which is most of a small decode
step. Steps are padded to a bucket of rows and of context length; a bucket is recorded when it is
first needed. The padding rows read and write the pool's spare block. What is recorded depends on
the addresses of weights and KV pool only, so whoever changes those calls ``clear``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
import torch
from torch import Tensor

from worker.model.batch import StepBatch, chunked
from worker.model.kernels.base import Chunked, Kernel, StaticAttend
from worker.model.kernels.padded import PaddedDecode
from worker.model.kvcache import KvPool
from worker.model.weights import LoadedModel
from worker.runner import StepPlan

Step = Callable[[], Tensor]
Recorder = Callable[[Step], Step]
"""Makes of a step one that does the same again on whatever its input tensors hold then."""

MOST_ROWS = 256
_SHORTEST = 256

log = structlog.get_logger(__name__)


class RecordedDecode:
    """Replays the decode steps of one model; ``record`` is a :class:`CudaRecorder` on CUDA."""

    def __init__(self, loaded: LoadedModel, pool: KvPool, record: Recorder) -> None:
        self._loaded, self._pool, self._record = loaded, pool, record
        if loaded.device.type == "cpu":  # padded copies read slots that nobody wrote
            for layer in pool.layers.values():
                layer.keys.zero_()
                layer.values.zero_()
        self._forms: dict[tuple[int, int, bool], _Form] = {}
        self.off = any(layer.spec.capped for layer in pool.layers.values())
        """Set for good once recording has failed."""
        self.replays = 0

    def logits(self, plan: StepPlan, kernel: Kernel | None) -> Tensor | None:
        """Logits ``[S, V]`` of a decode step; None if the step is of another kind.

        They are overwritten by the next step. ``kernel`` is the same in every call until ``clear``.
        """
        if self.off or len(plan.chunks) > MOST_ROWS:
            return None
        if any(len(c.tokens) > 1 or not c.sample or c.adapter or c.targets for c in plan.chunks):
            return None
        chunks = chunked(plan, self._pool)
        with torch.inference_mode():
            form = self._form(chunks, kernel)
            form.fill(plan, chunks)
            try:
                logits = form.run()
            except RuntimeError as error:
                log.warning("decode_recording_failed", reason=str(error).splitlines()[0])
                self.clear()
                self.off = True
                return None
        self.replays += 1
        return logits[: len(chunks)]

    def clear(self) -> None:
        """Forget what was recorded: weights or KV memory are no longer where they were."""
        self._forms.clear()

    def _form(self, chunks: list[Chunked], kernel: Kernel | None) -> _Form:
        rows, longest = bucket(len(chunks)), _SHORTEST
        while longest < max(chunk.end for chunk in chunks):
            longest *= 2
        anywhere = kernel is not None and kernel.any_blocks
        in_place = anywhere or all(chunk.first_slot is not None for chunk in chunks)
        key = rows, longest, in_place
        if key not in self._forms:
            self._forms[key] = self._new_form(kernel, rows, longest, in_place=in_place)
        return self._forms[key]

    def _new_form(self, kernel: Kernel | None, rows: int, longest: int, *, in_place: bool) -> _Form:
        device = self._loaded.device
        attend: StaticAttend = (
            PaddedDecode(self._pool, device, rows, longest)
            if kernel is None
            else kernel.static(self._pool, device, rows, longest, in_place=in_place)
        )
        return _Form(self._loaded, self._pool, attend, rows, self._record)


class _Form:
    """The tensors of one bucket and, after its first step, the recording."""

    def __init__(
        self, loaded: LoadedModel, pool: KvPool, attend: StaticAttend, rows: int, record: Recorder
    ) -> None:
        device = loaded.device
        self._attend, self._rows, self._block_size = attend, rows, pool.block_size
        self._spare_slot = pool.spare_block * pool.block_size
        self._inputs = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._batch = StepBatch(
            ids=self._inputs[0:1],
            positions=self._inputs[1:2],
            write_slots=self._inputs[2],
            spans=(),
            decodes=None,
            sampled_rows=torch.arange(rows, device=device),
            pool=pool,
            kernel=attend,
        )
        self._loaded, self._record = loaded, record
        self._replay: Step | None = None

    def fill(self, plan: StepPlan, chunks: list[Chunked]) -> None:
        """Lay the next step into the tensors."""
        padding = self._rows - len(chunks)
        size = self._block_size
        slots = [chunk.blocks[-1] * size + chunk.start % size for chunk in chunks]
        lines = [
            [chunk.tokens[0] for chunk in plan.chunks] + [0] * padding,
            [chunk.start for chunk in chunks] + [0] * padding,
            slots + [self._spare_slot] * padding,
        ]
        self._inputs.copy_(torch.tensor(lines), non_blocking=True)
        self._attend.fill(chunks)

    def run(self) -> Tensor:
        """Logits ``[rows, V]``. The first call records, with the tensors filled already."""
        if self._replay is None:
            self._replay = self._record(lambda: self._loaded.forward(self._batch))
        return self._replay()


class CudaRecorder:
    """Records a step as a CUDA graph; all of them share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = None

    def __call__(self, step: Step) -> Step:
        """Warm up on a side stream, as capturing asks for, then record. The step must be one that
        may be repeated: it writes the same KV to the same place each time."""
        here = torch.cuda.current_stream(self._device)
        aside: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(2):
                step()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = step()
        self._memory = self._memory or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def bucket(rows: int) -> int:
    """Rows that a step is padded to: powers of two up to 8, then eighths of the next power."""
    power = 1
    while power < rows:
        power *= 2
    grain = max(1, power // 8) if power > 8 else power
    return -(-rows // grain) * grain
