"""What ``--quantize int8`` costs and gives on a CPU, beside float32 on the same model.

Quality on English text: cross-entropy per token, how often the likeliest token is the same, and
after how many tokens greedy answers part. The text is the language reference that comes with Python
(``pydoc_data.topics``); its digest is printed. Speed: CPU seconds of this process for decode steps
of 1, 4 and 16 sequences after 512 tokens, and for prefill of 512 and 2,048 tokens. The variants
take turns, so that other work on the machine meets both; medians are printed.

    python bench/int8_loss.py           # about ten minutes on one thread
    python bench/int8_loss.py --skip speed

Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from worker.config import CacheConfig, ModelConfig
from worker.model.runner import TorchRunner
from worker.model.weights import LoadedModel
from worker.runner import Chunk, StepPlan
from worker.sequence import SamplingParams

BLOCK = 16
WINDOW = 1024
CONTEXT = 512
MOST_NEW = 48
SECTIONS = ("objects", "execmodel", "naming", "class", "exceptions", "import", "context-managers")
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain what a hash table is.",
    "Name three fruits and describe their taste.",
    "How do I boil an egg?",
    "What causes the seasons?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "Summarise the water cycle.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a story about a lighthouse keeper.",
    "How far is the moon?",
    "What should I pack for a mountain hike?",
    "Describe the process of photosynthesis.",
    "Translate 'good morning' into Spanish.",
    "What is inflation?",
    "Give advice for learning the violin.",
    "Why do cats purr?",
    "List the planets of the solar system.",
)


def the_text() -> str:
    """A few sections of the language reference, in a fixed order."""
    return "\n".join(topics[name] for name in SECTIONS if name in topics)


def forward(loaded: LoadedModel, ids: Tensor) -> Tensor:
    """Logits ``[T, V]`` with the model's own attention."""
    paged = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            return loaded.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]
    finally:
        loaded.model.set_attn_implementation(paged)


def quality(models: dict[str, LoadedModel], ids: list[int]) -> dict[str, Any]:
    """Loss per token of each, and how often the others agree with the first."""
    loss: dict[str, float] = dict.fromkeys(models, 0.0)
    agreed: dict[str, int] = dict.fromkeys(models, 0)
    count = 0
    for start in range(0, len(ids) - WINDOW, WINDOW):
        part = torch.tensor([ids[start : start + WINDOW + 1]])
        first: Tensor | None = None
        for name, loaded in models.items():
            logits = forward(loaded, part[:, :-1])
            loss[name] += float(functional.cross_entropy(logits, part[0, 1:], reduction="sum"))
            best = logits.argmax(-1)
            first = best if first is None else first
            agreed[name] += int((best == first).sum())
        count += WINDOW
    return {
        "tokens": count,
        "loss": {name: round(value / count, 4) for name, value in loss.items()},
        "same_top1": {name: round(value / count, 4) for name, value in agreed.items()},
    }


def chunk(name: str, start: int, tokens: tuple[int, ...], first_block: int) -> Chunk:
    """One sampled chunk in consecutive blocks."""
    blocks = range(first_block, first_block - (-(start + len(tokens)) // BLOCK))
    return Chunk(name, start, tokens, tuple(blocks), True, SamplingParams(temperature=0.0))


def greedy(runner: TorchRunner, prompt: list[int]) -> list[int]:
    """Up to :data:`MOST_NEW` tokens."""
    tokens = list(prompt)
    at = 0
    while len(tokens) < len(prompt) + MOST_NEW:
        plan = StepPlan((chunk("x", at, tuple(tokens[at:]), 0),))
        at = len(tokens)
        tokens.append(runner.run(plan).tokens["x"])
        if tokens[-1] in runner.eos_token_ids:
            break
    return tokens[len(prompt) :]


def divergence(runners: dict[str, TorchRunner], tokenizer: Tokenizer) -> dict[str, Any]:
    """Greedy answers to the questions: how many are the same, and where the others part."""
    (_, one), (_, other) = runners.items()
    parted = []
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        a, b = greedy(one, prompt), greedy(other, prompt)
        if a != b:
            pairs = zip(a, b, strict=False)
            parted.append(
                next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
            )
    return {
        "prompts": len(QUESTIONS),
        "most_new": MOST_NEW,
        "equal": len(QUESTIONS) - len(parted),
        "first_difference_median": statistics.median(parted) if parted else None,
    }


def plans(vocab: int) -> dict[str, StepPlan]:
    """The steps that are timed. Decodes read KV that nobody computed, which takes as long."""
    rng = Random(5)

    def some(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(17, vocab) for _ in range(n))

    each = CONTEXT // BLOCK + 1
    made = {
        f"decode_{n}": StepPlan(tuple(chunk(str(i), CONTEXT, some(1), i * each) for i in range(n)))
        for n in (1, 4, 16)
    }
    return made | {f"prefill_{n}": StepPlan((chunk("x", 0, some(n), 0),)) for n in (512, 2048)}


def speed(runners: dict[str, TorchRunner], rounds: int) -> dict[str, Any]:
    """Median CPU milliseconds of each step for each variant, and the first's over the second's."""
    found: dict[str, Any] = {}
    for name, plan in plans(next(iter(runners.values())).vocab_size).items():
        times: dict[str, list[float]] = {variant: [] for variant in runners}
        repeat = 1 if name.startswith("prefill") else 3
        for number in range(rounds + 1):
            for variant, runner in runners.items():
                started = time.process_time()
                for _ in range(repeat):
                    runner.logits(plan)
                if number:  # the first round warms up
                    times[variant].append((time.process_time() - started) / repeat * 1e3)
        medians = {variant: round(statistics.median(ms), 2) for variant, ms in times.items()}
        first, second = medians.values()
        found[name] = {"cpu_ms": medians, "ratio": round(first / second, 2)}
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048, help="of the text")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--skip", action="append", default=[], choices=["quality", "greedy", "speed"]
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runners = {
        name: TorchRunner.load(
            ModelConfig(
                path=options.model,
                device="cpu",
                dtype="float32",
                quantize=quantize,
                threads=options.threads,
            ),
            CacheConfig(kv_blocks=16 * (CONTEXT // BLOCK + 1), block_size=BLOCK),
        )
        for name, quantize in (("float32", "none"), ("int8", "int8"))
    }
    models = {name: runner._loaded for name, runner in runners.items()}
    for runner in runners.values():
        for layer in runner.pool.layers.values():
            layer.keys.normal_()
            layer.values.normal_()
    tokenizer = Tokenizer.from_file(str(Path(models["int8"].source) / "tokenizer.json"))
    text = the_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: options.tokens + 1]
    result: dict[str, Any] = {
        "model": models["int8"].name,
        "torch": torch.__version__,
        "threads": options.threads,
        "text": f"pydoc_data.topics of Python {platform.python_version()}, "
        f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}",
    }
    if "quality" not in options.skip:
        result["quality"] = quality(models, ids)
    if "greedy" not in options.skip:
        result["greedy"] = divergence(runners, tokenizer)
    if "speed" not in options.skip:
        result["speed"] = speed(runners, options.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
