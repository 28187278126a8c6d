"""Tiny real models for the cases: random weights, scaled so that answers are not degenerate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from enginerig import Answer, Rig, decode
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from shared.render import byte_bundle
from worker.detokenise import Detokenizer
from worker.model.runner import TorchRunner
from worker.model.weights import describe
from worker.runner import TokenLogprob
from worker.sequence import SamplingParams
from worker.steploop import StepLoop

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def tiny_llama(vocab_size: int, dtype: torch.dtype, **more: Any) -> Any:
    """A Llama whose greedy answers vary and depend on all of the prompt."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=2048, **{**SIZES, **more}
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.add_(torch.randn_like(weight) * 0.05)
            elif "embed" in name:
                weight.normal_()
            else:
                gain = 2.5 if "q_proj" in name or "k_proj" in name else 1.5
                weight.normal_(std=gain * weight.shape[-1] ** -0.5)
    return model.eval()


def byte_model(folder: Path) -> Path:
    """A model over bytes and ChatML markers, float32."""
    bundle = byte_bundle()
    folder.mkdir()
    (folder / "tokenizer.json").write_text(bundle.tokenizer_json)
    config = {"chat_template": bundle.chat_template, "eos_token": bundle.eos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tiny_llama(259, torch.float32, eos_token_id=[257, 258], bos_token_id=256).save_pretrained(
        folder
    )
    return folder


TEXTS = (
    "the quick brown fox jumps over the lazy dog and runs along the river to the sea " * 20,
    "system user assistant tool call function name arguments result answer question " * 20,
    "über größe naïve café 你好 世界 привет мир 🌍 🚀 1234567890 \n\n\t {}[]()<>!? " * 20,
)
BOS_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + (message['content'] or '') | trim + '<|end|>' }}"
    "{%- for call in message.tool_calls or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def merging_model(folder: Path) -> Path:
    """A model with merges across words and a BOS that template and tokenizer both add."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": BOS_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = tokenizer.get_vocab_size()
    tiny_llama(size, torch.float32, eos_token_id=1, bos_token_id=0).save_pretrained(folder)
    return folder


def fallback_model(folder: Path) -> Path:
    """A model in SentencePiece's way: words with a blank in front, bytes for what is no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581the", "\u2581a", "ing", "\u4f60", "\u597d", "\U0001f30d", "\u00e9"]
    pieces += [chr(code) for code in range(0x21, 0x7F)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": BOS_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = len(pieces)
    tiny_llama(size, torch.float32, eos_token_id=2, bos_token_id=1).save_pretrained(folder)
    return folder


# --- the engine with a real model, steps by hand --------------------------------------------------

VOCAB = 259
MAX_LEN = 2048


@cache
def byte_llama(dtype: torch.dtype) -> Any:
    """The weights that all engines of a test session share."""
    torch.set_num_threads(1)
    return tiny_llama(VOCAB, dtype, eos_token_id=257)


class TorchRig(Rig):
    """``enginerig.Rig`` with a Llama instead of the fake; float64 unless told otherwise."""

    def __init__(
        self,
        n_blocks: int = 40,
        block_size: int = 16,
        budget: int = 64,
        *,
        caching: bool = True,
        max_running: int = 24,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(
            n_blocks,
            block_size,
            budget,
            caching=caching,
            max_running=max_running,
            max_model_len=MAX_LEN,
            eos_token_ids=frozenset({257}),
        )
        self.runner = TorchRunner(describe(byte_llama(dtype)), n_blocks, block_size, threads=1)
        self.loop = StepLoop(
            self.runner,
            self.scheduler,
            lambda tokens: Detokenizer(decode, tokens),
            self._clock,
            self.events.extend,
            self._deliver,
        )


class TorchReference:
    """Answers of an engine with caching off, one request at a time, all prompt in one step."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self._rig = TorchRig(n_blocks=160, budget=8192, caching=False, dtype=dtype)
        self._known: dict[object, Answer] = {}

    def answer(self, tokens: Sequence[int], params: SamplingParams) -> Answer:
        """The right answer."""
        key = (tuple(tokens), repr(params))
        if key not in self._known:
            self._known[key] = self._rig.answer(tokens, params)
        return self._known[key]


def said(answer: Answer) -> tuple[object, ...]:
    """What must be equal whatever the cache did."""
    last = answer.last
    return answer.text, answer.tokens, last.finish, last.stop_reason, last.output_tokens


def logprobs_of(answer: Answer) -> list[TokenLogprob]:
    """The log-probabilities of all answer tokens."""
    return [each for delta in answer.deltas for each in delta.logprobs or ()]


def close(ours: Answer, theirs: Answer, limit: float = 1e-4) -> bool:
    """Same top tokens with the same log-probabilities, up to ``limit``."""
    pairs = list(zip(logprobs_of(ours), logprobs_of(theirs), strict=True))
    return bool(pairs) and all(
        abs(one.logprob - two.logprob) <= limit
        and [token for token, _ in one.top] == [token for token, _ in two.top]
        and all(abs(a - b) <= limit for (_, a), (_, b) in zip(one.top, two.top, strict=True))
        for one, two in pairs
    )
