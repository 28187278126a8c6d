"""Is the answer ever changed by chunking, prefix reuse, batching, eviction or preemption?

Greedy answers of the real engine (scheduler, block pool, runner) against ``generate()`` of an
untouched copy of the same model in float32. An answer may differ from its reference only from a
token on at which the reference's best two logits are closer than ``--margin``; such near-ties are
listed. At last one KV block is spoilt on purpose, to show that the comparison can fail.

    python bench/equality.py            # five minutes on one thread
    python bench/equality.py --scale 0.2

Prints one line of JSON; exit code 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.equality_lab import Case, Lab
from worker.config import ModelConfig
from worker.model.speedups import with_cpu_kernels
from worker.model.weights import load_model

MOST_NEW = 24
WORDS = (
    "river harbour engine cache prefix worker signal mountain letter market doctor winter garden "
    "window copper violin desert planet theory bridge ticket morning basket captain library yellow "
    "slow quiet broken heavy seven twelve 1987 42 every under because between often never"
).split()


def prompts(tokenizer: Tokenizer, n: int, rng: Random) -> Iterator[tuple[int, ...]]:
    """Chats over a few shared openings, every fourth one a list of random tokens."""

    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(low, high)))

    openings = [f"<|im_start|>system\n{text(3, 120)}<|im_end|>\n" for _ in range(8)]
    for number in range(n):
        if number % 4 == 3:
            yield tuple(rng.randrange(17, 49_000) for _ in range(rng.randrange(20, 200)))
            continue
        ask = f"<|im_start|>user\nTell me about {text(2, 60)}?<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(rng.choice(openings) + ask, add_special_tokens=False).ids
        yield tuple(ids[-300:])


def reference(model: Any, prompt: tuple[int, ...], new: int) -> Case:
    """``generate()`` alone, with a mask of ones: the pad token occurs inside prompts."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = tuple(out.sequences[0, len(prompt) :].tolist())
    return Case(prompt, tokens, torch.cat(out.logits))


def say(what: str, started: float) -> None:
    """Progress, on stderr."""
    print(f"{time.monotonic() - started:6.1f} s  {what}", file=sys.stderr, flush=True)


def measure(lab: Lab, cases: list[Case], scale: float, rng: Random, started: float) -> float:
    """All scenarios; returns the share of answers that a spoilt block changed."""

    def some(n: int) -> list[Case]:
        return rng.sample(cases, min(len(cases), max(2, round(n * scale))))

    for budget, n, size in ((512, 20, 16), (64, 20, 16), (7, 14, 5), (512, 10, 1)):
        lab.chunked(f"chunk {budget} block {size}", some(n), budget, size)
        say(f"chunks of {budget}, blocks of {size}", started)
    for size, n in ((16, 30), (3, 14)):
        lab.warm(f"warm block {size}", some(n), size, rng)
        say(f"warm, blocks of {size}", started)
    lab.together("batch", some(40), budget=128, running=16, blocks=700, size=16)
    say("batched", started)
    lab.together("evicting", some(24), budget=96, running=2, blocks=46, size=16)
    say("evicting", started)
    # Short prompts and single-token blocks: many run at once and all grow, so space runs out.
    short = sorted(cases, key=lambda case: len(case.prompt))[: len(some(28))]
    room = 2 * (len(short[-1].prompt) + MOST_NEW)
    lab.together("preempting", short, budget=64, running=16, blocks=room, size=1)
    say("preempting", started)
    spoilt = [case for case in some(24) if len(case.prompt) > 33]
    share = lab.spoilt(spoilt, rng) / len(spoilt)
    say(f"spoilt blocks changed {share:.0%}", started)
    return share


def main() -> int:
    """Run everything and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the cases to run")
    parser.add_argument("--margin", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started, rng = time.monotonic(), Random(args.seed)
    loaded = load_model(args.model, "cpu", "float32", progress=lambda text: say(text, started))
    loaded = with_cpu_kernels(loaded, ModelConfig(), args.threads)
    lab = Lab(loaded, args.threads, args.margin)
    plain = AutoModelForCausalLM.from_pretrained(loaded.source, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(f"{loaded.source}/tokenizer.json")
    n_prompts = max(8, round(56 * args.scale))
    cases = [
        reference(plain, prompt, rng.randrange(12, MOST_NEW + 1))
        for prompt in prompts(tokenizer, n_prompts, rng)
    ]
    say(f"{len(cases)} references", started)
    spoilt = measure(lab, cases, args.scale, rng, started)
    tally = lab.close()
    real = [d for d in tally.divergences if not d["near_tie"]]
    ok = (
        not real
        and len(tally.divergences) <= 0.01 * tally.cases
        and tally.worst_logits < 1e-4
        and spoilt >= 0.95
        and min(tally.cached_tokens, tally.preemptions, tally.evicted_blocks, tally.gathers) > 0
    )
    summary = {
        "ok": ok,
        "cases": tally.cases,
        "equal": tally.cases - len(tally.divergences),
        "divergences": tally.divergences,
        "worst_relative_logits": float(f"{tally.worst_logits:.2e}"),
        "spoilt_block_changes": round(spoilt, 3),
        "cached_tokens": tally.cached_tokens,
        "evicted_blocks": tally.evicted_blocks,
        "preemptions": tally.preemptions,
        "views": tally.views,
        "gathers": tally.gathers,
        "by_scenario": tally.by_scenario,
        "cpu_kernels": loaded.cpu_kernels is not None,
        "threads": args.threads,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(summary))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
