"""Models that paged attention would get wrong are refused at load, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from worker.model.runner import TorchRunner
from worker.model.support import Unsupported, check_config
from worker.model.weights import describe

pytestmark = pytest.mark.torch

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("BloomConfig", {"n_head": 4, "n_layer": 2}, "attention interface"),
    "mpt": ("MptConfig", {"d_model": 48, "n_heads": 4, "n_layers": 2}, "attention interface"),
    "stablelm": ("StableLmConfig", {}, "attention interface"),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "rope_parameters": None}, "s_aux"),
    "mamba": ("MambaConfig", {}, "linear_attention"),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 48}, "attention interface"),
    "qwen3_next": ("Qwen3NextConfig", {"num_experts": 4, "num_hidden_layers": 4}, "linear_atten"),
    "llama4_text": ("Llama4TextConfig", {"num_hidden_layers": 4}, "chunked_attention"),
    "deepseek_v3": ("DeepseekV3Config", {"kv_lora_rank": 16}, "MLA"),
    "t5": ("T5Config", {}, "encoder-decoder"),
}


def config_of(kind: str, size: dict[str, Any]) -> Any:
    name, own, _ = REFUSED[kind]
    fields = {**size, **own}
    return getattr(transformers, name)(**{k: v for k, v in fields.items() if v is not None})


@pytest.mark.parametrize("kind", list(REFUSED))
def test_refused(kind: str, tiny_size: dict[str, Any]) -> None:
    config = config_of(kind, tiny_size)
    with pytest.raises(Unsupported, match=REFUSED[kind][2]):
        load(config)


def load(config: Any) -> None:
    """As when reading a folder: the configuration is looked at first."""
    check_config(config)
    describe(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        ("llama", [None, None, None]),
        ("mistral", [20, 20, 20]),
        ("qwen2_window", [None, 20, 20]),
        ("gemma3_text", [20, 20, None]),
        ("gemma2", [20, None, 20]),
    ],
)
def test_windows_are_read_off_the_masks(
    driver: Callable[..., Any], kind: str, windows: list[int | None]
) -> None:
    specs = driver(kind).loaded.layers.values()
    assert [spec.window for spec in specs] == windows
    assert [spec.capped for spec in specs] == [kind == "gemma2"] * 3


def test_a_window_beyond_the_longest_sequence_is_none(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> None:
    model = model_of(config_of_kind("mistral", sliding_window=200))
    assert {s.window for s in describe(model, max_model_len=200).layers.values()} == {None}
    assert {s.window for s in describe(model, max_model_len=201).layers.values()} == {200}


class _Leaky(torch.nn.Module):
    """Passes something on from each token to the next one, beside attention."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shifted = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return self.inner(hidden + shifted)


def test_state_between_tokens_is_found_by_the_comparison(driver: Callable[..., Any]) -> None:
    made = driver("llama")
    made.runner.check()
    layer = made.loaded.model.model.layers[1]
    layer.mlp = _Leaky(layer.mlp)
    with pytest.raises(Unsupported, match="differs from plain attention"):
        made.runner.check()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "gpt_neox", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_comparison_passes_for_good_models(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any], kind: str, dtype: torch.dtype
) -> None:
    loaded = describe(model_of(config_of_kind(kind), dtype))
    TorchRunner(loaded, 4, 5, threads=1).check()
