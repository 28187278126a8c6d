"""``model.compile`` and ``model.cuda_graphs``: they work, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import ConfigError
from worker.config import CacheConfig, ModelConfig
from worker.model import compiled, speedups
from worker.model.runner import TorchRunner
from worker.model.weights import describe

pytestmark = pytest.mark.torch


def test_cuda_graphs_are_refused_without_cuda(
    tmp_path: Path, config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> None:
    model_of(config_of_kind("llama"), torch.float32).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), device="cpu", threads=1, cuda_graphs=True)
    with pytest.raises(ConfigError, match=r"model\.cuda_graphs: .*need a CUDA device"):
        TorchRunner.load(config, CacheConfig(kv_blocks=4))


# the tracing compiler alone: code generation takes minutes and is torch's own matter
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_compiled_model_gives_the_tokens_of_generate(
    driver: Callable[..., Any], kind: str
) -> None:
    made = driver(kind)
    told: list[str] = []
    made.runner.compile(told.append, backend="eager")
    assert "compiling" in told[0]
    torch._dynamo.utils.counters.clear()
    prompts = [list(range(2, 60)), list(range(9, 40)), [7, 8]]
    blocks = [made.blocks(70, first=20 * i, scattered=i == 1) for i in range(3)]
    together = made.decode_together(prompts, 6, blocks, size=13)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0, "compiled while serving"
    assert together == [made.expected(prompt, 6)[0] for prompt in prompts]


def test_a_model_that_cannot_be_compiled_is_refused(
    config_of_kind: Callable[..., Any],
    model_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> Any:
        def fails(**_: object) -> Any:
            raise RuntimeError("no working C++ compiler\nlong trace")

        return fails

    monkeypatch.setattr(compiled.torch, "compile", broken)
    loaded = describe(model_of(config_of_kind("llama")))
    with pytest.raises(ConfigError, match=r"model\.compile: .*no working C\+\+ compiler$"):
        speedups.compile_model(loaded, lambda _: None)
