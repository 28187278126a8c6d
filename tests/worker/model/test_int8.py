"""int8 linear layers: exact sums, one scale per token, and a model that stays itself."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
from torch import nn

from shared.errors import ConfigError
from worker.config import CacheConfig, ModelConfig
from worker.model import int8, quantize
from worker.model.batch import Layout
from worker.model.cpu_compile import NoCpuKernels
from worker.model.cpu_int8 import Int8Kernel, load_int8_kernel
from worker.model.int8 import Int8Linear, quantize_linears, shared_product
from worker.model.quantize import quantized
from worker.model.runner import TorchRunner
from worker.model.sameinput import SharedProduct
from worker.model.selfcheck import check_against_plain, distance
from worker.model.speedups import takes_decodes, with_cpu_kernels
from worker.model.support import Unsupported
from worker.model.weights import describe
from worker.runner import Chunk, StepPlan
from worker.sequence import SamplingParams

pytestmark = [
    pytest.mark.torch,
    # of PEFT, about transformers
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:::peft"),
]

FAMILIES = [
    *("llama", "llama_mha_bias", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2"),
    *("gpt_neox", "opt", "gpt2", "starcoder2"),
]


def rows(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(x: torch.Tensor, weight: torch.Tensor, levels: int) -> torch.Tensor:
    """``x @ weight.T`` with both rounded as documented, summed in integers."""
    steps = weight.abs().amax(1) / 127
    bytes_ = (weight / steps[:, None]).round().long()
    peak = x.abs().amax(-1, keepdim=True)
    sums = (x / peak * levels).round().long() @ bytes_.t()
    return sums * (peak / levels) * steps


@dataclass(frozen=True)
class Route:
    """One of the ways to multiply; on a CPU without the first the second stands in for it."""

    kernel: Int8Kernel | None
    levels: int


@pytest.fixture(scope="module")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def own_kernel(kernel_folder: Path) -> Int8Kernel | None:
    try:
        return load_int8_kernel(kernel_folder / "kernels", 1)
    except NoCpuKernels:
        return None


@pytest.fixture(params=["own", "fbgemm", "portable"])
def route(
    request: pytest.FixtureRequest,
    own_kernel: Int8Kernel | None,
    monkeypatch: pytest.MonkeyPatch,
) -> Route:
    if request.param == "own" and own_kernel is not None:
        return Route(own_kernel, 127)
    if request.param == "portable":
        monkeypatch.setattr(int8, "_fbgemm_levels", lambda: 0)
    return Route(None, int8._fbgemm_levels() or 127)


@pytest.mark.parametrize("shape", [(1, 40), (7, 40), (2, 3, 40), (1, 130, 40)])
def test_a_product_is_the_sum_of_rounded_numbers(shape: tuple[int, ...], route: Route) -> None:
    layer = nn.Linear(40, 24, bias=False)
    with torch.inference_mode():
        out = shared_product([layer], route.kernel).of(rows(*shape), 0)
        wanted = by_hand(rows(*shape), layer.weight, route.levels)
        assert torch.allclose(out, wanted, atol=1e-5)


def test_largest_weights_and_activations_do_not_saturate(route: Route) -> None:
    signs = torch.tensor([1.0, -1.0]).repeat(256)
    product = int8.pack(signs.expand(16, 512).contiguous(), None, route.kernel)
    assert torch.allclose(product(signs[None]), torch.full((1, 16), 512.0), rtol=1e-5)
    assert torch.allclose(product(-signs[None]), torch.full((1, 16), -512.0), rtol=1e-5)


def test_a_row_does_not_depend_on_its_batch(route: Route) -> None:
    shared = shared_product([nn.Linear(48, 40), nn.Linear(48, 8, bias=False)], route.kernel)
    x = rows(33, 48)
    x[5] *= 1e4  # would leave nothing of the others under a scale for all
    with torch.inference_mode():
        together = shared.of(x, 0)
        for i in range(33):
            assert torch.equal(shared.of(x[i : i + 1], 0)[0], together[i])


def test_rows_of_zeros_and_of_no_numbers_stay_what_they_are(route: Route) -> None:
    layer = nn.Linear(16, 8)
    x = rows(4, 16)
    x[0], x[1, 3], x[2, 3] = 0, float("nan"), float("inf")
    with torch.inference_mode():
        out = shared_product([layer], route.kernel).of(x, 0)
        assert torch.equal(out[0], layer.bias)
        assert out[1].isnan().all()
        assert not out[2].isfinite().any()
        assert torch.equal(out[3], shared_product([layer], route.kernel).of(x[3:], 0)[0])


def test_rows_too_small_for_a_step_come_out_as_good_as_nothing(route: Route) -> None:
    weight, bias = rows(8, 16), rows(8, seed=2)
    x = rows(3, 16) * torch.tensor([[1e-31], [1e-38], [1e-42]])
    out = int8.pack(weight, None, route.kernel)(x)
    assert torch.allclose(out * 1e20, torch.zeros(3, 8))
    assert torch.equal(int8.pack(weight, bias, route.kernel)(x), bias.expand(3, 8))


def test_no_rows_give_no_rows(route: Route) -> None:
    assert int8.pack(rows(8, 16), None, route.kernel)(torch.empty(1, 0, 16)).shape == (1, 0, 8)


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 24), nn.Linear(16, 8, bias=False)
        self.v_proj, self.o_proj = nn.Linear(16, 8), nn.Linear(24, 16)


def test_siblings_share_a_product_and_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    module = Siblings()
    before = dict(module.named_children())
    alone = {name: shared_product([layer]) for name, layer in before.items()}
    assert quantize_linears(module) == 4
    computed: list[int] = []
    compute = SharedProduct._compute

    def counting(self: SharedProduct, x: torch.Tensor) -> torch.Tensor:
        computed.append(len(x))
        return compute(self, x)

    monkeypatch.setattr(SharedProduct, "_compute", counting)
    with torch.inference_mode():
        for x in (rows(3, 16), rows(5, 16, seed=2)):
            for name in ("q_proj", "k_proj", "v_proj"):
                out = getattr(module, name)(x)
                assert torch.allclose(out, compute(alone[name], x), atol=1e-6)
                out += 100  # as an adapter does: changes what was handed out, nobody else's
        assert computed == [3, 5]
        x = rows(2, 16)
        first = module.k_proj(x)
        wanted = first.clone()
        first += 1
        assert torch.equal(module.k_proj(x), wanted)
        assert torch.equal(module.k_proj(rows(2, 16, seed=4)), module.k_proj(rows(2, 16, seed=4)))


def test_the_stand_in_looks_like_the_layer() -> None:
    module = Siblings()
    quantize_linears(module)
    assert isinstance(module.q_proj, nn.Linear)
    assert (module.q_proj.in_features, module.q_proj.out_features) == (16, 24)
    assert list(module.parameters()) == []


def test_layers_that_are_packed_already_are_not_taken_for_quantized(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any], tmp_path: Path
) -> None:
    loaded = describe(model_of(config_of_kind("llama"), torch.float32))
    with_cpu_kernels(loaded, ModelConfig(cache_dir=str(tmp_path)), 1)
    with pytest.raises(ConfigError, match=r"model\.quantize.*there are none"):
        quantized(loaded, 5)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("own", [False, True])
def test_families(
    config_of_kind: Callable[..., Any],
    model_of: Callable[..., Any],
    kernel_folder: Path,
    kind: str,
    own: bool,
) -> None:
    config = ModelConfig(quantize="int8", cpu_kernels=own, cache_dir=str(kernel_folder))
    loaded = describe(model_of(config_of_kind(kind), torch.float32))
    made = quantized(with_cpu_kernels(loaded, config, 1), 5)
    linears = [m for m in made.model.modules() if isinstance(m, nn.Linear)]
    assert linears
    assert all(isinstance(m, Int8Linear) for m in linears)
    TorchRunner(made, 4, 5, threads=1).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_come_out_as_they_went_in(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any], dtype: torch.dtype
) -> None:
    made = quantized(describe(model_of(config_of_kind("llama"), dtype)), 5)
    assert made.dtype == dtype
    TorchRunner(made, 4, 5, threads=1).check()


def test_a_tied_output_layer_leaves_the_embedding_as_it_is(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> None:
    model = model_of(config_of_kind("llama", tie_word_embeddings=True), torch.float32)
    before = model.get_input_embeddings().weight.clone()
    quantized(describe(model), 5)
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert isinstance(model.get_output_embeddings(), Int8Linear)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_are_refused_by_name_and_nothing_is_changed(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any], kind: str
) -> None:
    loaded = describe(model_of(config_of_kind(kind), torch.float32))
    with pytest.raises(ConfigError, match=r"model\.quantize.*Experts\.down_proj"):
        quantized(loaded, 5)
    assert not any(isinstance(m, Int8Linear) for m in loaded.model.modules())


def test_a_model_that_reads_its_weights_by_itself_is_refused(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> None:
    model = model_of(config_of_kind("llama"), torch.float32)
    loaded = describe(model)
    head = model.lm_head
    model.lm_head.forward = lambda x: x @ head.weight.T
    model.model.layers[0].mlp.forward = lambda x: (
        x @ model.model.layers[0].mlp.gate_proj.weight.T[:, :48]
    )
    with pytest.raises(ConfigError, match="does not fit this model"):
        quantized(loaded, 5)


def test_a_model_that_int8_spoils_is_refused(
    config_of_kind: Callable[..., Any],
    model_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def coarse(weight: torch.Tensor, *_: Any) -> int8.Product:
        return lambda x: x @ weight.sign().T

    monkeypatch.setattr(int8, "pack", coarse)
    with pytest.raises(ConfigError, match="logits differ by"):
        quantized(describe(model_of(config_of_kind("llama"), torch.float32)), 5)


def test_a_wrong_model_is_found_at_full_precision_before(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> None:
    loaded = describe(model_of(config_of_kind("llama"), torch.float32))
    inner = loaded.model.model.layers[1].mlp.forward
    # one hundredth of the token before: below what a comparison in int8 could tell from rounding
    loaded.model.model.layers[1].mlp.forward = lambda x: inner(
        x + 0.01 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    )
    with pytest.raises(ConfigError, match="differs from plain attention"):
        quantized(loaded, 5)


def test_the_check_compares_int8_with_int8(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> None:
    made = quantized(describe(model_of(config_of_kind("llama"), torch.float32)), 5)
    check_against_plain(made, 5, Layout(made.device))
    inner = made.model.model.layers[1].mlp.forward
    made.model.model.layers[1].mlp.forward = lambda x: inner(
        x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    )
    with pytest.raises(Unsupported, match="differs from plain attention"):
        check_against_plain(made, 5, Layout(made.device))


def test_loading_with_the_setting(
    tmp_path: Path,
    config_of_kind: Callable[..., Any],
    model_of: Callable[..., Any],
    own_kernel: Int8Kernel | None,
) -> None:
    model_of(config_of_kind("llama"), torch.float32).save_pretrained(tmp_path / "tiny")
    config = ModelConfig(path=str(tmp_path / "tiny"), quantize="int8", threads=1, device="cpu")
    runner = TorchRunner.load(config, CacheConfig(kv_blocks=8))
    assert (runner._loaded.int8_kernel is None) == (own_kernel is None)
    assert takes_decodes(runner._loaded)
    layers = [m for m in runner._loaded.model.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 3 * 7 + 1
    assert all(isinstance(m, Int8Linear) for m in layers)


def test_cuda_needs_torchao_and_says_so(
    config_of_kind: Callable[..., Any],
    model_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = describe(model_of(config_of_kind("llama"), torch.float32))
    monkeypatch.setattr(type(loaded), "device", torch.device("cuda:0"))
    monkeypatch.setattr(quantize, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the package 'torchao' on cuda:0"):
        quantize._quantize_in_place(loaded)
    asked: list[Any] = []
    torchao = ModuleType("torchao.quantization")
    torchao.Int8DynamicActivationInt8WeightConfig = lambda: "per token"  # type: ignore[attr-defined]
    torchao.quantize_ = lambda model, how: asked.append((model, how))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", torchao)
    monkeypatch.setattr(quantize, "find_spec", lambda _: object())
    quantize._quantize_in_place(loaded)
    assert asked == [(loaded.model, "per token")]


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("llama", ["q_proj", "v_proj", "up_proj", "down_proj"]), ("gpt2", ["c_attn", "c_proj"])],
)
def test_adapters_on_a_quantized_model(
    tmp_path: Path,
    config_of_kind: Callable[..., Any],
    model_of: Callable[..., Any],
    kind: str,
    targets: list[str],
) -> None:
    model = model_of(config_of_kind(kind), torch.float32)
    config = peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=kind == "gpt2")
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_" in name:
                weight.copy_(rows(*weight.shape) * weight.shape[-1] ** -0.5)
    tuned.save_pretrained(tmp_path)
    runner = TorchRunner(quantized(describe(model), 8), 8, 8, threads=1)
    runner.adapters.survey(runner.logits, 64)
    runner.adapters.install("tuned", runner.adapters.read(str(tmp_path)))
    tokens = tuple(range(3, 23))
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        wanted = tuned.eval()(input_ids=ids, use_cache=False).logits[0, -1]
        with tuned.disable_adapter():
            own = tuned(input_ids=ids, use_cache=False).logits[0, -1]
    params = SamplingParams()
    chunks = (
        Chunk("plain", 0, tokens, (0, 1, 2), True, params),
        Chunk("tuned", 0, tokens, (3, 4, 5), True, params, adapter="tuned"),
    )
    plain, adapted = runner.logits(StepPlan(chunks))
    # A CPU without VNNI rounds activations to half as many levels.
    near = 0.15 * 127 / (int8._fbgemm_levels() or 127)
    assert distance(adapted, wanted) < near
    assert distance(plain, wanted) > 0.5
    assert distance(plain, own) < near
