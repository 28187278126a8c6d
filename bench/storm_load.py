"""What ``bench/storm.py`` asks: its settings, a tiny model and its adapters, random requests."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from shared.blocks import Scope
from worker.engine import GenerationRequest
from worker.sequence import SamplingParams

VOCAB, EOS, MAX_LEN = 259, 257, 2048
LONGEST_ANSWER = 120
TENANTS = ("a", "b")
"""Two, who must share nothing; the tokens of both are the same."""
ADAPTED_PROMPTS = 4
"""So many of the prompts are also asked of adapters: each needs a right answer of its own."""


@dataclass(frozen=True)
class Setting:
    """One engine under test."""

    name: str
    n_blocks: int
    block_size: int
    budget: int
    max_running: int
    clients: int
    max_step_ms: float = 0.0
    longest: int = 300
    """Longest prompt."""
    prompts: int = 30
    host_blocks: int = 0


SETTINGS = (
    Setting("forty blocks", 40, 16, 64, 24, 24),
    Setting("odd block size", 130, 5, 96, 24, 24),
    Setting("small budget, time budget", 40, 16, 16, 8, 12, max_step_ms=5.0),
    Setting("roomy", 400, 16, 512, 32, 32, max_step_ms=30.0, longest=900),
    Setting("blocks of one token", 500, 1, 48, 16, 16),
    Setting("nearly no room", 12, 16, 40, 6, 10, longest=150),
    Setting("host memory", 40, 16, 64, 24, 24, host_blocks=60),
    Setting("little host memory, odd blocks", 130, 5, 96, 24, 24, host_blocks=25),
)


def tiny_model(dtype: torch.dtype) -> torch.nn.Module:
    """A Llama whose greedy answers vary and depend on all of the prompt."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=MAX_LEN, hidden_size=48, intermediate_size=80,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=False, eos_token_id=EOS,
    )  # fmt: skip
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" in name:
                weight.normal_()
            elif weight.dim() > 1:
                gain = 2.5 if "q_proj" in name or "k_proj" in name else 1.5
                weight.normal_(std=gain * weight.shape[-1] ** -0.5)
    return model.eval()


@dataclass(frozen=True)
class AdapterFolder:
    """A LoRA adapter as it is loaded."""

    name: str
    folder: str


def tiny_adapters(model: torch.nn.Module, folder: Path) -> tuple[AdapterFolder, ...]:
    """Two that change the answers of :func:`tiny_model`, in different modules."""
    made = []
    for name, targets, rank in (("one", ("q_proj", "v_proj"), 4), ("two", ("down_proj",), 2)):
        tensors: dict[str, torch.Tensor] = {}
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and path.endswith(targets):
                sizes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
                for part, shape in sizes.items():
                    weight = torch.randn(shape, dtype=torch.float64) * shape[1] ** -0.5
                    tensors[f"base_model.model.{path}.lora_{part}.weight"] = weight
        place = folder / name
        place.mkdir()
        save_file(tensors, place / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
        config["target_modules"] = list(targets)
        (place / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        made.append(AdapterFolder(name, str(place)))
    return tuple(made)


def root_of(tenant: str, adapter: str) -> bytes:
    """Chain root of what one tenant asks of one adapter's scope."""
    return Scope("tiny", "bytes", adapter, tenant).root(b"")


class Load:
    """Draws requests. Others may add kinds: a method that returns a request with a new property."""

    def __init__(self, rng: random.Random, setting: Setting) -> None:
        self.rng = rng
        longest = min(setting.longest, setting.n_blocks * setting.block_size - LONGEST_ANSWER)
        self.prompts = [self._fresh(rng.randint(1, longest))]
        while len(self.prompts) < setting.prompts:
            start = rng.choice(self.prompts)[: rng.randint(0, longest)]
            start = start if rng.random() < 0.6 else ()
            length = rng.randint(1, longest)
            self.prompts.append((start + self._fresh(length))[:length])
        self.params = [
            SamplingParams(max_tokens=1, temperature=0.0),
            SamplingParams(max_tokens=12, temperature=0.0),
            SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
            SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0.0, ignore_eos=True),
            SamplingParams(max_tokens=30, temperature=0.0, stop=("e", "th", "\n"), min_tokens=2),
            SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2),
            SamplingParams(max_tokens=20, temperature=0.8, seed=5, presence_penalty=0.5),
            SamplingParams(max_tokens=25, temperature=1.1, seed=42, top_p=0.9, top_k=40),
        ]

    def _fresh(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(97, 123), k=length))

    def draw(self, name: str, served: Sequence[str] = ()) -> list[GenerationRequest]:
        """A request with one to three choices, some of them of a ``served`` adapter's scope."""
        rng = self.rng
        params = rng.choice(self.params)
        number = rng.randrange(len(self.prompts))
        adapter = ""
        if number < ADAPTED_PROMPTS and rng.random() < 0.5 and served:
            adapter = rng.choice(served)
        deadline = time.monotonic() + rng.expovariate(1.0) if rng.random() < 0.15 else None
        request = GenerationRequest(
            name, self.prompts[number], params, root_of(rng.choice(TENANTS), adapter),
            priority=rng.choice([0, 0, 0, 1, 2]), deadline=deadline, adapter=adapter,
        )  # fmt: skip
        if params.seed is None:
            return [request]
        return [
            replace(request, id=f"{name}.{n}", params=replace(params, seed=params.seed + n))
            for n in range(rng.randint(1, 3))
        ]
