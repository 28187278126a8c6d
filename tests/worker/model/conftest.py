"""Tiny models of many architectures, made on the spot, and a driver that feeds plans by hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch
    import transformers
    from torch import Tensor

    from worker.model.runner import TorchRunner
    from worker.model.weights import LoadedModel, describe
    from worker.runner import Chunk, StepPlan
    from worker.sequence import SamplingParams

VOCAB = 131
WINDOW = 20
"""Shorter than every prompt of the equality tests."""

_SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": VOCAB - 1,
}
_MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_mha_bias": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_MOE, "decoder_sparse_step": 1}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "layer_types": _MIXED, "query_pre_attn_scalar": 16},
    ),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW, "head_dim": None, "hidden_size": 64}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.2}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "gpt_neox": ("GPTNeoXConfig", {"hidden_size": 64, "head_dim": None}),
    "opt": ("OPTConfig", {"hidden_size": 64, "ffn_dim": 80, "word_embed_proj_dim": 64}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
}
"""Name -> configuration class and what it changes; KV heads are fewer than heads where possible."""


def make_config(kind: str, **changes: Any) -> Any:
    """The tiny configuration of one architecture."""
    name, own = ARCHITECTURES[kind]
    fields = {**_SIZE, **own, **changes}
    return getattr(transformers, name)(**{k: v for k, v in fields.items() if v is not None})


def make_model(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Random weights scaled so that attention is sharp and tokens vary."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype or torch.float64)
    if hasattr(config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.add_(torch.randn_like(weight) * 0.05)
            elif "embed" in name or "wte" in name or "wpe" in name:
                weight.normal_()
            else:
                gain = 2.5 if any(p in name for p in ("q_proj", "k_proj", "qkv", "c_attn")) else 1.5
                weight.normal_(std=gain * weight.shape[-1] ** -0.5)
    return model.eval()


@dataclass(eq=False)
class Driver:
    """Runs sequences through a runner with block tables that it chooses itself."""

    loaded: LoadedModel
    runner: TorchRunner
    reference: str
    """Attention of transformers to compare with."""

    def blocks(self, length: int, *, first: int = 0, scattered: bool = False) -> tuple[int, ...]:
        """A table for ``length`` tokens; scattered blocks are every second one, backwards."""
        count = -(-length // self.runner.block_size)
        if not scattered:
            return tuple(range(first, first + count))
        return tuple(first + 2 * i for i in reversed(range(count)))

    def chunk(self, name: str, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> Chunk:
        """One sampled chunk: ``tokens[start:]``."""
        return Chunk(
            name, start, tuple(tokens[start:]), tuple(blocks), True, SamplingParams(temperature=0)
        )

    def prefill(
        self, tokens: Sequence[int], blocks: Sequence[int], *, start: int = 0, size: int = 10**6
    ) -> Tensor:
        """Compute ``tokens[start:]`` in chunks of ``size``; logits ``[V]`` of the last token."""
        logits = torch.empty(0)
        for begin in range(start, len(tokens), size):
            chunk = self.chunk("x", tokens[: begin + size], begin, blocks)
            logits = self.runner.logits(StepPlan((chunk,)))[0]
        return logits

    def decode(
        self, prompt: Sequence[int], n: int, blocks: Sequence[int], **how: Any
    ) -> tuple[list[int], Tensor]:
        """Greedy tokens and their logits ``[n, V]``."""
        tokens, rows = list(prompt), [self.prefill(prompt, blocks, **how)]
        tokens.append(int(rows[-1].argmax()))
        for _ in range(n - 1):
            chunk = self.chunk("x", tokens, len(tokens) - 1, blocks)
            rows.append(self.runner.logits(StepPlan((chunk,)))[0])
            tokens.append(int(rows[-1].argmax()))
        return tokens[len(prompt) :], torch.stack(rows)

    def decode_together(
        self, prompts: Sequence[Sequence[int]], n: int, tables: Sequence[Sequence[int]], size: int
    ) -> list[list[int]]:
        """Greedy tokens of several sequences in shared steps; long prompts join late."""
        states = [list(prompt) for prompt in prompts]
        done = [0] * len(prompts)
        while any(len(s) < len(p) + n for s, p in zip(states, prompts, strict=True)):
            chunks = []
            for i, tokens in enumerate(states):
                if len(tokens) < len(prompts[i]) + n:
                    end = min(len(tokens), done[i] + size)
                    made = self.chunk(str(i), tokens[:end], done[i], tables[i])
                    chunks.append(msgspec.structs.replace(made, sample=end == len(tokens)))
                    done[i] = end
            result = self.runner.run(StepPlan(tuple(chunks)))
            assert set(result.tokens) == {c.seq_id for c in chunks if c.sample}
            for name, token in result.tokens.items():
                states[int(name)].append(token)
        return [s[len(p) :] for s, p in zip(states, prompts, strict=True)]

    def expected(self, prompt: Sequence[int], n: int) -> tuple[list[int], Tensor]:
        """Greedy tokens of ``generate()`` and logits ``[n, V]`` of one plain forward over them."""
        model = self.loaded.model
        ours = model.config._attn_implementation
        model.set_attn_implementation(self.reference)
        ids = torch.tensor([list(prompt)])
        try:
            with torch.inference_mode():
                whole = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=n,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
                logits = model(input_ids=whole, attention_mask=torch.ones_like(whole)).logits[0]
        finally:
            model.set_attn_implementation(ours)
        return whole[0, len(prompt) :].tolist(), logits[len(prompt) - 1 : -1]


@pytest.fixture(scope="session")
def driver() -> Callable[..., Driver]:
    """``driver(kind, block_size=8, n_blocks=160, host_blocks=0, **config)`` makes a model and a
    driver for it."""
    torch.set_num_threads(1)

    def make(
        kind: str, block_size: int = 8, n_blocks: int = 160, host_blocks: int = 0, **config: Any
    ) -> Driver:
        loaded = describe(make_model(make_config(kind, **config)))
        runner = TorchRunner(loaded, n_blocks, block_size, threads=1)
        runner.use_host_memory(host_blocks)
        return Driver(loaded, runner, "eager" if kind == "gemma2" else "sdpa")

    return make


@pytest.fixture(scope="session", params=list(ARCHITECTURES))
def any_driver(request: pytest.FixtureRequest, driver: Callable[..., Driver]) -> Driver:
    """A driver for each architecture in turn."""
    return driver(request.param)


@pytest.fixture(scope="session")
def tiny_size() -> dict[str, Any]:
    """Configuration fields that make any architecture tiny."""
    return dict(_SIZE)


@pytest.fixture(scope="session")
def config_of_kind() -> Callable[..., Any]:
    """``config_of_kind(kind, **changes)``: a tiny configuration."""
    return make_config


@pytest.fixture(scope="session")
def model_of() -> Callable[..., Any]:
    """``model_of(config, dtype=float64)``: a random model."""
    return make_model
