"""Measuring the real model: time in forward, bounds of the machine, a model's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from shared.render import Renderer
from worker.benchmark import Benchmark, Bounds, Report, Sizes
from worker.config import WorkerConfig
from worker.drive import Meter, Spent
from worker.model.batch import StepBatch
from worker.model.cpu_layer import LayerForward
from worker.model.fetch import Progress
from worker.model.hugepages import huge_empty
from worker.model.kvcache import KvPool
from worker.model.recorded import Recorder, Step
from worker.model.runner import TorchRunner
from worker.model.weights import LoadedModel
from worker.probe import ModelShape, Probe

READ_BYTES = 1 << 30
"""Several times the largest cache (300 MB were met), or much of it is still there the next time."""
READ_ROW = 16384
"""Floats of a row of the product: several rows are read side by side, which is faster where they
are longer than a page, so long as the vector stays in the cache."""
GEMM_SIZE = 2048
_NOISE_SLOTS = 8192


class ThisClock:
    """Of this process."""

    seconds = staticmethod(perf_counter)

    def __call__(self) -> Spent:
        """This moment."""
        return Spent(perf_counter(), process_time())


clock = ThisClock()


@dataclass(slots=True)
class ForwardTime:
    """Seconds spent in forward passes so far. Bare numbers: what measures a step is part of it."""

    wall: float = 0.0
    cpu: float = 0.0


@dataclass(frozen=True)
class TimedModel(LoadedModel):
    """A model that adds up the time of its forward passes; it waits for the device after each."""

    time: ForwardTime = field(default_factory=ForwardTime, kw_only=True)

    def forward(
        self, batch: StepBatch, rows: Tensor | None = None, *, changed: bool = False
    ) -> Tensor:
        """As the base class."""
        if batch.ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return LoadedModel.forward(self, batch, rows, changed=changed)  # nothing runs yet
        return self.measured(lambda: LoadedModel.forward(self, batch, rows, changed=changed))

    def measured(self, step: Step) -> Tensor:
        """Run a forward pass and add its time."""
        wall, cpu = perf_counter(), process_time()
        logits = step()
        _wait(logits.device)
        self.time.wall += perf_counter() - wall
        self.time.cpu += process_time() - cpu
        return logits

    def measuring(self, record: Recorder) -> Recorder:
        """Steps that ``record`` makes, with their time added."""

        def recorded(step: Step) -> Step:
            replay = record(step)
            return lambda: self.measured(replay)

        return recorded


class TimedRunner(TorchRunner):
    """A runner that knows how long its forward passes took, and what its model looks like."""

    def __init__(self, loaded: LoadedModel, *sizes: int, **settings: Any) -> None:
        facts = {item.name: getattr(loaded, item.name) for item in fields(LoadedModel)}
        timed = TimedModel(**facts)
        super().__init__(timed, *sizes, **settings)
        self._timed = timed
        self.time = timed.time
        self.shape = shape_of(loaded)
        self.device, self.dtype, self.source = loaded.device, loaded.dtype, loaded.source

    def record_decodes(self, record: Recorder) -> None:
        """As the base class."""
        super().record_decodes(self._timed.measuring(record))

    @property
    def by_layers(self) -> LayerForward | None:
        """What computes its layers in C, if anything does."""
        made = self._timed.by_layers
        return made if isinstance(made, LayerForward) else None

    def forward(self) -> Spent:
        """Time spent in forward passes so far."""
        return Spent(self.time.wall, self.time.cpu)

    def write_noise(self, n_blocks: int) -> None:
        """Random KV in the first ``n_blocks`` blocks, so that reading them costs what KV costs."""
        write_noise(self.pool, n_blocks, self.device)


def benchmark(config: WorkerConfig, say: Progress) -> Report:
    """Load the model as a worker would, and measure it. Raises ``ConfigError``.

    Only so much KV memory is taken as the largest size needs, unless the settings name an amount.
    """
    sizes = Sizes()
    runner = TimedRunner.load(config.model, config.cache, say)
    blocks = min(runner.n_blocks, sizes.blocks(runner.block_size))
    runner.write_noise(blocks)
    renderer = Renderer(runner.bundle, 0)
    decode = partial(renderer.decode, skip_special_tokens=True)
    probe = Probe(runner, clock, runner.forward, decode, blocks=blocks)
    say("bounds of this machine")
    bounds = Bounds(Reading(runner.device).rate(), gemm_rate(runner.device, runner.dtype))
    probe.prefill(min(64, blocks * runner.block_size - 1))
    measured = Benchmark(
        probe,
        runner.shape,
        bounds,
        sizes,
        say,
        budget=config.schedule.max_batch_tokens,
        caching=config.cache.prefix_cache,
        threads=torch.get_num_threads(),
    )
    return measured.run(
        {
            "model": runner.model_name,
            "device": str(runner.device),
            "dtype": str(runner.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "kv_blocks": runner.n_blocks,
            "block_size": runner.block_size,
            "max_batch_tokens": config.schedule.max_batch_tokens,
        }
    )


def write_noise(pool: KvPool, n_blocks: int, device: torch.device) -> None:
    """Untouched memory is all one page of zeros, which a CPU reads from its cache."""
    slots = n_blocks * pool.block_size
    for layer in pool.layers.values():
        spec, size = layer.spec, min(slots, _NOISE_SLOTS)
        shape = (spec.kv_heads, size)
        keys = torch.randn(*shape, spec.key_dim, device=device).to(spec.dtype)
        values = torch.randn(*shape, spec.value_dim, device=device).to(spec.dtype)
        for start in range(0, slots, size):
            end = min(start + size, slots)
            places = torch.arange(start, end, device=device)
            layer.write(places, keys[:, : end - start], values[:, : end - start])


def shape_of(loaded: LoadedModel) -> ModelShape | None:
    """Sizes of a dense model; None for a mixture of experts, where a token uses some weights."""
    model: Any = loaded.model
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        return None
    head = model.get_output_embeddings()
    outside = (model.get_input_embeddings(), head)
    body = sum(_weights(module) for module in model.modules() if module not in outside)
    q_heads = text.num_attention_heads
    width = sum(q_heads * (spec.key_dim + spec.value_dim) for spec in loaded.layers.values()) // 2
    kv_bytes = sum(spec.bytes_per_token for spec in loaded.layers.values())
    return ModelShape(body, loaded.vocab_size * text.hidden_size, width, kv_bytes)


def _weights(module: nn.Module) -> int:
    """Weights that every token is multiplied by; packed and quantised layers hold theirs apart."""
    if isinstance(n_in := getattr(module, "in_features", None), int):
        return n_in * int(getattr(module, "out_features", 0))
    return sum(t.numel() for t in module.parameters(recurse=False) if t.ndim == 2)


class Reading:
    """Bytes a second that this many threads read from memory: the better of a sum and a product.

    On a CPU the memory lies in large pages, as weights and KV do.
    """

    def __init__(self, device: torch.device, meter: Meter = "wall") -> None:
        self._device, self._meter = device, meter
        shape = (READ_BYTES // 4 // READ_ROW, READ_ROW)
        if device.type == "cpu":
            self._data = huge_empty(shape, torch.float32).fill_(1.0)
        else:
            self._data = torch.ones(shape, device=device)
        self._vector = torch.ones(READ_ROW, device=device)

    def rate(self, repeats: int = 5) -> float:
        """Measured now; the best of ``repeats``."""
        best = min(
            _fastest(self._data.sum, self._device, self._meter, repeats),
            _fastest(lambda: self._data @ self._vector, self._device, self._meter, repeats),
        )
        return READ_BYTES / best


def gemm_rate(
    device: torch.device, dtype: torch.dtype, meter: Meter = "wall", repeats: int = 3
) -> float:
    """Floating-point operations a second of a product of two large square matrices."""
    a, b = (torch.ones(GEMM_SIZE, GEMM_SIZE, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * GEMM_SIZE**3 / _fastest(lambda: a @ b, device, meter, repeats)


def _fastest(work: Callable[[], Tensor], device: torch.device, meter: Meter, repeats: int) -> float:
    """Seconds of the fastest repetition after one that is not counted."""
    best = float("inf")
    with torch.inference_mode():
        for number in range(repeats + 1):
            _wait(device)
            started = clock()
            work()
            _wait(device)
            if number:
                best = min(best, (clock() - started).by(meter))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
