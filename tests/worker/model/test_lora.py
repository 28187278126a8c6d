"""Adapters of PEFT give PEFT's own answers: in mixed batches, chunked, warm and preempted."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.blocks import Scope
from shared.paging import BlockPool
from worker.adapterfiles import AdapterRefused
from worker.config import ModelConfig
from worker.model.packed import PackedLinear
from worker.model.runner import TorchRunner
from worker.model.speedups import with_cpu_kernels, with_layer_calls
from worker.model.weights import describe
from worker.runner import Chunk, RunnerError, StepPlan
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams
from worker.sequence import Sequence as Generation

pytestmark = [
    pytest.mark.torch,
    # of PEFT, about transformers
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:::peft"),
]
SIZE, NEW = 8, 10
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=NEW)
EVERY_LINEAR: dict[str, Any] = {"target_modules": "all-linear"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "qwen2": EVERY_LINEAR,
    "gpt_neox": {"target_modules": ["query_key_value", "dense_4h_to_h"], "use_rslora": True},
    "opt": {"target_modules": r".*\.layers\.[02]\.(self_attn\.(k|out)_proj|fc1)"},
    "gpt2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj"], "layers_to_transform": [1]},
    "qwen3": {
        **EVERY_LINEAR,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 7},
        "alpha_pattern": {"v_proj": 3},
        "exclude_modules": ["o_proj"],
    },
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 129) for _ in range(length)]


def make_adapter(model: Any, folder: Path, seed: int, **config: Any) -> Any:
    """Save a random adapter; returns the reference: a PEFT model of its own."""
    chosen: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **config}
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("sdpa")
    wrapped = peft.get_peft_model(ours, peft.LoraConfig(**chosen), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight.copy_(0.5 * noise * weight.shape[-1] ** -0.5)
    wrapped.save_pretrained(folder)
    return wrapped.eval()


def expected(reference: Any, prompt: Sequence[int], n: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their logits by PEFT."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        for _ in range(n):
            logits = reference(input_ids=ids, use_cache=False).logits[0]
            ids = torch.cat([ids, logits[-1:].argmax(-1)[None]], dim=1)
        logits = reference(input_ids=ids, use_cache=False).logits[0]
    return ids[0, len(prompt) :].tolist(), logits[len(prompt) - 1 : -1]


class Served:
    """A tiny model with its adapters, and their references by scope; "" is the model itself."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.runner = driver, driver.runner
        self.model = driver.loaded.model
        self.before = copy.deepcopy(self.model.state_dict())
        self.runner.adapters.survey(self.runner.logits, SIZE * self.runner.n_blocks)
        plain = copy.deepcopy(self.model)
        plain.set_attn_implementation("sdpa")
        self.references: dict[str, Any] = {"": plain}

    def add(self, scope: str, folder: Path, **config: Any) -> None:
        made = make_adapter(self.model, folder, seed=len(self.references), **config)
        self.runner.adapters.install(scope, self.runner.adapters.read(str(folder)))
        self.references[scope] = made

    def run(self, asks: Sequence[tuple[str, Sequence[int]]], **limits: Any) -> list[Generation]:
        """Answers of the scheduler with a pool of its own."""
        blocks = limits.pop("blocks", 150)
        params = SamplingParams(
            temperature=0,
            ignore_eos=True,
            max_tokens=NEW,
            prompt_logprobs=limits.pop("prompt_logprobs", None),
        )
        settings = {"max_batch_tokens": 64, "max_running": 16, "max_waiting": 99, **limits}
        scheduler = Scheduler(
            BlockPool(blocks, SIZE),
            max_model_len=self.runner.max_model_len,
            eos_token_ids=self.runner.eos_token_ids,
            **settings,
        )
        made = []
        for name, (scope, prompt) in enumerate(asks):
            root = Scope("m", "t", adapter=scope).root(b"key")
            one = Generation(str(name), list(prompt), len(prompt), params, root, 0.0, adapter=scope)
            made.append(one)
            scheduler.add(one)
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, self.runner.run(plan))
            scheduler.check()
        return made

    def check(self, made: Sequence[Generation]) -> None:
        for one in made:
            prompt = one.tokens[: one.prompt_len]
            wanted, _ = expected(self.references[one.adapter], prompt, NEW)
            assert one.tokens[one.prompt_len :] == wanted, one.adapter


@pytest.fixture(scope="module")
def llama(driver: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Served:
    served = Served(driver("llama", block_size=SIZE, n_blocks=160))
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("a", "b", "c"):
        served.add(name, folder / name, **EVERY_LINEAR)
    return served


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_answer_as_peft_does(
    driver: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    made = driver(kind, block_size=SIZE, n_blocks=160)
    served = Served(made)
    served.add("x", tmp_path / "x", **FAMILIES[kind])
    prompt = prompt_of(45)
    tokens, logits = expected(served.references["x"], prompt, NEW)
    assert tokens != expected(served.references[""], prompt, NEW)[0]
    blocks = made.blocks(len(prompt) + NEW)
    whole = [*prompt, *tokens]
    for size in (1, 13, 64):
        rows = []
        for end in [len(prompt), *range(len(prompt) + 1, len(whole))]:
            start = 0 if end == len(prompt) else end - 1
            for begin in range(start, end, size):
                chunk = made.chunk("x", whole[: min(end, begin + size)], begin, blocks)
                row = served.runner.logits(
                    StepPlan((msgspec.structs.replace(chunk, adapter="x"),))
                )[0]
            rows.append(row)
        ours = torch.stack(rows)
        assert float((ours - logits).abs().max() / logits.abs().max()) < 1e-9
    served.check(served.run([("x", prompt), ("", prompt), ("x", prompt_of(20, 1))]))


def test_mixed_batches_chunked_warm_and_preempted(llama: Served) -> None:
    shared = prompt_of(40)
    asks = [
        (scope, shared + prompt_of(5 + 3 * i, seed=i))
        for i, scope in enumerate(["a", "", "b", "a", "c", "", "b", "a"])
    ]
    llama.check(llama.run(asks))
    llama.check(llama.run(asks, max_batch_tokens=11))
    pressed = llama.run(asks, blocks=18)
    assert sum(one.preemptions for one in pressed)
    llama.check(pressed)
    repeated = llama.run([*asks, *asks], max_running=8)
    assert all(one.cached for one in repeated[8:])
    llama.check(repeated)


def test_kv_of_one_adapter_is_never_anothers(llama: Served) -> None:
    prompt = prompt_of(48)
    made = llama.run([(scope, prompt) for scope in ("a", "b", "", "a", "b", "")], max_running=1)
    assert [one.cached for one in made] == [0, 0, 0, 40, 40, 40]
    llama.check(made)


def test_the_output_layer_can_be_adapted(driver: Callable[..., Any], tmp_path: Path) -> None:
    served = Served(driver("llama", block_size=SIZE, n_blocks=160))
    served.add("head", tmp_path / "head", target_modules=["lm_head", "v_proj"])
    served.add("body", tmp_path / "body", target_modules=["up_proj"])
    asks = [(s, prompt_of(20 + i, i)) for i, s in enumerate(["head", "", "body", "head", ""])]
    served.check(served.run(asks, max_batch_tokens=17))
    scored = served.run(asks, max_batch_tokens=17, prompt_logprobs=1)
    served.check(scored)
    for one in scored:
        ids = torch.tensor([one.tokens[: one.prompt_len]])
        with torch.inference_mode():
            logits = served.references[one.adapter](input_ids=ids, use_cache=False).logits[0]
        right = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        assert [entry.logprob for entry in one.scores] == pytest.approx(right.tolist(), abs=1e-9)
    # PEFT saves the layer itself with it; it must be the model's own
    path = tmp_path / "head" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.lm_head.base_layer.weight"
    save_file({**tensors, name: tensors[name] + 1}, path)
    with pytest.raises(AdapterRefused, match="lm_head"):
        served.runner.adapters.read(str(tmp_path / "head"))


def test_experts_that_see_some_rows_only_are_refused(
    driver: Callable[..., Any], tmp_path: Path
) -> None:
    class Halves(torch.nn.Module):
        """As experts do: what it holds sees a part of the rows at a time."""

        def __init__(self, expert: torch.nn.Linear) -> None:
            super().__init__()
            self.expert = expert

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.expert(x[:, :3]), self.expert(x[:, 3:])], dim=1)

    made = driver("llama", block_size=SIZE, n_blocks=160)
    mlp = made.loaded.model.model.layers[0].mlp
    mlp.up_proj = Halves(mlp.up_proj)
    served = Served(made)
    make_adapter(served.model, tmp_path / "x", 1, target_modules=["expert"])
    with pytest.raises(AdapterRefused, match="expert"):
        served.runner.adapters.read(str(tmp_path / "x"))


def test_base_weights_and_forwards_stay_as_they_are(llama: Served) -> None:
    llama.run([("a", prompt_of(20)), ("b", prompt_of(9))])
    for name, weight in llama.model.state_dict().items():
        assert torch.equal(weight, llama.before[name])
    assert not any("forward" in module.__dict__ for module in llama.model.modules())


def test_an_adapter_can_come_and_go(llama: Served, tmp_path: Path) -> None:
    store = llama.runner.adapters
    llama.add("late", tmp_path / "late", target_modules=["k_proj"])
    llama.check(llama.run([("late", prompt_of(30)), ("a", prompt_of(30))]))
    store.remove("late")
    with pytest.raises(RunnerError, match="late"):
        llama.run([("late", prompt_of(30))])
    llama.check(llama.run([("a", prompt_of(30))]))


def test_an_adapter_of_the_output_layer_on_packed_weights(
    driver: Callable[..., Any], tmp_path: Path
) -> None:
    model = driver("llama", block_size=SIZE, n_blocks=20).loaded.model.to(torch.float32)
    reference = make_adapter(model, tmp_path / "x", 1, target_modules=["lm_head", "down_proj"])
    packed = with_cpu_kernels(describe(model), ModelConfig(cache_dir=str(tmp_path)), 1)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    packed = with_layer_calls(packed, ModelConfig(cache_dir=str(tmp_path)), 1)
    assert packed.by_layers is not None  # and yet the adapter is added
    runner = TorchRunner(packed, 20, SIZE, threads=1)
    runner.adapters.survey(runner.logits_by_modules, 20 * SIZE)
    runner.adapters.install("x", runner.adapters.read(str(tmp_path / "x")))
    prompt = tuple(prompt_of(21))
    chunk = Chunk("x", 0, prompt, (0, 1, 2), True, GREEDY, adapter="x")
    ours = runner.logits(StepPlan((chunk,)))[0]
    with torch.inference_mode():
        wanted = reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
    assert float((ours - wanted).abs().max() / wanted.abs().max()) < 1e-4
    path = tmp_path / "x" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.lm_head.base_layer.weight"
    save_file({**tensors, name: tensors[name] * 1.1}, path)
    with pytest.raises(AdapterRefused, match="lm_head"):
        runner.adapters.read(str(tmp_path / "x"))


# ---- what is refused ----


def saved(llama: Served, folder: Path, **config: Any) -> Path:
    make_adapter(llama.model, folder, 1, **{"target_modules": ["q_proj"], **config})
    return folder


def edited(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding"),
        ({"r": 65}, "max_lora_rank"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
    ],
)
def test_what_is_more_than_plain_lora_is_refused(
    llama: Served, tmp_path: Path, config: dict[str, Any], word: str
) -> None:
    folder = saved(llama, tmp_path / "x", **config)
    with pytest.raises(AdapterRefused, match=word):
        llama.runner.adapters.read(str(folder))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 3}, "rank 3"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"r": 0}, "below 1"),
        ({"r": "four"}, "cannot be read"),
        ({"target_modules": ["v_proj"]}, "does not target"),
        ({"target_modules": ["q_proj", "v_proj"]}, "no weights"),
        ({"target_modules": "("}, "no pattern"),
        ({"rank_pattern": {"q_proj": 5}}, "rank 5"),
        ({"a_setting_of_tomorrow": True}, "a_setting_of_tomorrow"),
        ({"target_modules": None}, "target_modules"),
    ],
)
def test_a_config_that_does_not_fit_its_weights_is_refused(
    llama: Served, tmp_path: Path, fields: dict[str, Any], word: str
) -> None:
    folder = edited(saved(llama, tmp_path / "x"), **fields)
    with pytest.raises(AdapterRefused, match=word):
        llama.runner.adapters.read(str(folder))


@pytest.mark.parametrize("fault", ["cut", "empty", "missing", "pickle", "half", "nan", "folder"])
def test_broken_weights_are_refused(llama: Served, tmp_path: Path, fault: str) -> None:
    folder = saved(llama, tmp_path / "x")
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    first = next(iter(tensors))
    if fault in ("cut", "empty"):
        path.write_bytes(whole[: len(whole) // 2] if fault == "cut" else b"")
    elif fault in ("missing", "pickle"):
        path.unlink()
        if fault == "pickle":
            (folder / "adapter_model.bin").write_bytes(whole)
    elif fault == "folder":
        path.unlink()
        path.mkdir()
    elif fault == "half":
        save_file({name: t for name, t in tensors.items() if name != first}, path)
    else:
        save_file({**tensors, first: torch.full_like(tensors[first], float("nan"))}, path)
    with pytest.raises(AdapterRefused) as error:
        llama.runner.adapters.read(str(folder))
    assert "\n" not in str(error.value)


def test_an_adapter_of_another_model_is_refused(
    llama: Served, driver: Callable[..., Any], tmp_path: Path
) -> None:
    wider = driver("llama", block_size=SIZE, n_blocks=20, hidden_size=64)
    deeper = driver("llama", block_size=SIZE, n_blocks=20, num_hidden_layers=4)
    foreign = driver("gpt_neox", block_size=SIZE, n_blocks=20)
    for number, (other, word) in enumerate(
        [(wider, "rank 4 on this model"), (deeper, "layers.3"), (foreign, "gpt_neox")]
    ):
        folder = tmp_path / str(number)
        make_adapter(other.loaded.model, folder, 1, **EVERY_LINEAR)
        with pytest.raises(AdapterRefused, match=word):
            llama.runner.adapters.read(str(folder))
