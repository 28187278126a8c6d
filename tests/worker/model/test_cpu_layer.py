"""Layers computed by the worker's C code give what the model's own modules give."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import structlog
import torch

from worker.config import ModelConfig
from worker.model import cpu_layer
from worker.model.cpu_chunk import ChunkKernel
from worker.model.cpu_compile import _CHUNK as CHUNK
from worker.model.cpu_compile import open_library
from worker.model.cpu_native import first_largest
from worker.model.quantize import quantized
from worker.model.runner import TorchRunner
from worker.model.speedups import with_cpu_kernels, with_layer_calls
from worker.model.weights import LoadedModel, describe
from worker.runner import Chunk, StepPlan
from worker.sequence import SamplingParams

pytestmark = pytest.mark.torch
ORDINARY = ("llama", "llama_mha_bias", "qwen2", "qwen2_window", "qwen3", "mistral", "granite")
OTHER = {
    "gemma": "layer 0",  # another activation
    "smollm3": "layer 1",  # not rotated
    "qwen3_moe": "down_proj",
    "olmo2": "input_layernorm",
    "phi3": "q_proj",
    "starcoder2": "down_proj",
    "opt": "rotary_emb",
}
"""Family -> what of it is named as not ordinary."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def made(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any], compiled: str
) -> Callable[..., LoadedModel]:
    """A tiny model with the kernels, maybe quantized, and with layer calls if it is ordinary.

    Chunks are attended to by the worker's kernel or by torch, whichever pays on this CPU.
    """

    def make(
        kind: str,
        quantize: Literal["none", "int8"] = "none",
        chunks_by: Literal["ours", "torch"] = "ours",
        **changes: Any,
    ) -> LoadedModel:
        config = ModelConfig(cache_dir=compiled, quantize=quantize)
        loaded = describe(model_of(config_of_kind(kind, **changes), torch.float32))
        loaded = with_cpu_kernels(loaded, config, 1)
        assert loaded.cpu_kernels is not None
        library = open_library(CHUNK, Path(compiled))
        loaded.cpu_kernels.chunks = ChunkKernel(library, 1) if chunks_by == "ours" else None
        if quantize != "none":
            loaded = quantized(loaded, 4)
        return with_layer_calls(loaded, config, 1)

    return make


def steps(vocab_size: int) -> list[StepPlan]:
    """First chunks, decodes beside chunks with history, decodes alone; scattered blocks."""
    rng, params = Random(3), SamplingParams(temperature=0.0)
    tables = [tuple(rng.sample(range(i * 10, i * 10 + 10), 10)) for i in range(4)]
    texts = [[rng.randrange(vocab_size) for _ in range(36)] for _ in tables]
    cuts = (
        [(0, 9)] * 4,
        [(9, 10), (9, 31)] * 2,
        [(10, 11), (31, 32)] * 2,
        [(11, 12), (32, 33)] * 2,
    )
    return [
        StepPlan(
            tuple(
                Chunk(f"s{i}", a, tuple(texts[i][a:b]), tables[i], True, params)
                for i, (a, b) in enumerate(spans)
            )
        )
        for spans in cuts
    ]


@pytest.mark.parametrize("chunks_by", ["ours", "torch"])
@pytest.mark.parametrize("kind", ORDINARY)
def test_families_with_ordinary_layers_answer_as_their_modules(
    kind: str, chunks_by: str, made: Callable[..., LoadedModel]
) -> None:
    loaded = made(kind, chunks_by=chunks_by)
    assert loaded.by_layers is not None
    ours = TorchRunner(loaded, 40, 4, threads=1)
    ours.check()
    by_modules = TorchRunner(replace(loaded, by_layers=None), 40, 4, threads=1)
    for plan in steps(loaded.vocab_size):
        one, other = ours.logits(plan), by_modules.logits(plan)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_the_others_of_its_step(made: Callable[..., LoadedModel]) -> None:
    loaded = made("qwen3")
    together, alone = (TorchRunner(loaded, 40, 4, threads=1) for _ in range(2))
    for plan in steps(loaded.vocab_size):
        rows = together.logits(plan)
        for row, chunk in zip(rows, plan.chunks, strict=True):
            assert torch.equal(alone.logits(StepPlan((chunk,)))[0], row)


@pytest.mark.parametrize("chunks_by", ["ours", "torch"])
def test_steps_that_are_one_call_tell_the_time_of_their_attention(
    chunks_by: str, made: Callable[..., LoadedModel]
) -> None:
    loaded = made("llama", chunks_by=chunks_by)
    layers, runner = loaded.by_layers, TorchRunner(loaded, 40, 4, threads=1)
    assert isinstance(layers, cpu_layer.LayerForward)
    layers.attention_time = (ctypes.c_double * 2)()
    seen = []
    for plan in steps(loaded.vocab_size):
        started = time.perf_counter()
        runner.logits(plan)
        seen.append((time.perf_counter() - started, *layers.attention_time))
    told = chunks_by == "ours"
    assert [wall > 0 for _, wall, _ in seen] == [told, told, True, True]
    for (_, wall, cpu), (more, later, later_cpu) in pairwise(seen):
        assert wall <= later <= wall + more
        assert cpu <= later_cpu


def test_what_the_head_found_is_for_its_own_logits_alone(made: Callable[..., LoadedModel]) -> None:
    loaded = made("llama")
    layers, runner = loaded.by_layers, TorchRunner(loaded, 40, 4, threads=1)
    assert isinstance(layers, cpu_layer.LayerForward)
    for plan in steps(loaded.vocab_size):
        logits = runner.logits(plan)
        changed = logits.clone()
        changed[:, 5] = 1e9
        assert layers.largest(changed) == ([1e9] * len(changed), [5] * len(changed))
        logits = runner.logits(plan)
        found = layers.largest(logits)
        assert found == first_largest(logits) == layers.largest(logits)


def test_a_quantized_model_has_layer_calls_too(made: Callable[..., LoadedModel]) -> None:
    loaded = made("llama", "int8")
    if loaded.int8_kernel is None:
        assert loaded.by_layers is None  # torch's own products cannot be called from C
        return
    assert loaded.by_layers is not None
    ours = TorchRunner(loaded, 40, 4, threads=1)
    by_modules = TorchRunner(replace(loaded, by_layers=None), 40, 4, threads=1)
    for plan in steps(loaded.vocab_size):
        one, other = ours.logits(plan), by_modules.logits(plan)
        assert float((one - other).norm() / other.norm()) < 0.05


@pytest.mark.parametrize("kind", OTHER)
def test_other_families_run_as_they_are_and_the_log_says_why(
    kind: str, made: Callable[..., LoadedModel]
) -> None:
    with structlog.testing.capture_logs() as logs:
        assert made(kind).by_layers is None
    (line,) = [line for line in logs if line["event"] == "layers_run_as_modules"]
    assert OTHER[kind] in line["reason"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"residual_multiplier": 0.9}, "layer 0"),
        ({"embedding_multiplier": 1.1}, "around"),
        ({"logits_scaling": 1.1}, "around"),
    ],
)
def test_a_difference_that_no_name_shows_is_found(
    changes: dict[str, float], named: str, made: Callable[..., LoadedModel]
) -> None:
    with structlog.testing.capture_logs() as logs:
        assert made("granite", **changes).by_layers is None
    assert named in next(line["reason"] for line in logs if "reason" in line)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("two * sine[i];", "two * sine[i] * 1.01f;"),
        ("+ eps)", "+ 2 * eps + 1e-3f)"),
        ("x / (1.0f +", "x / (1.001f +"),
        ("step->x[i] += step->normed[i]", "step->x[i] += 1.01f * step->normed[i]"),
        ("step->slots[row] *", "step->slots[0] *"),
        ("layer->o, step->attended", "layer->o, step->attended + 1"),
        ("layer->scale, layer->threads", "2 * layer->scale, layer->threads"),
        ("dim, layer->keys, layer->values,", "dim, layer->keys, layer->keys,"),
    ],
)
def test_code_with_wrong_results_is_not_used(
    made: Callable[..., LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    right: str,
    wrong: str,
) -> None:
    text = cpu_layer._SOURCE.read_text()
    if right not in text:
        pytest.fail(f"{right} is not in the source any more")
    spoilt = tmp_path / "cpu_layer.c"
    spoilt.write_text(text.replace(right, wrong))
    monkeypatch.setattr(cpu_layer, "_SOURCE", spoilt)
    with structlog.testing.capture_logs() as logs:
        assert made("llama").by_layers is None
    assert "differs" in next(line["reason"] for line in logs if "reason" in line)
