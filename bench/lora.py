"""What LoRA adapters cost: CPU seconds of a step with 0, 1 and 4 of them, as ratios in one run.

    python bench/lora.py                     # SmolLM2, rank 16 on every linear layer, one thread
    python bench/lora.py --rank 8 --targets q_proj,v_proj

Two steps are measured, in turns: 16 sequences that decode at a context of 512, and one prompt of
512 tokens (with 4 adapters: 4 chunks of 128, beside 4 plain ones). "peft" is the same packed step
through a model that PEFT has wrapped, which takes one adapter for all rows at most: its own mixed
batches give each *row of a padded batch* an adapter, and a packed step is a batch of one. PEFT
needs weights that it can read, so its ratio is to the plain step over weights in plain layout.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch

from worker.config import CacheConfig, ModelConfig
from worker.model.runner import TorchRunner
from worker.model.weights import load_model
from worker.runner import Chunk, StepPlan
from worker.sequence import SamplingParams

BATCH, CONTEXT, PROMPT, BLOCK = 16, 512, 512, 16
NAMES = ("a", "b", "c", "d")
ROOM = BATCH * (CONTEXT // BLOCK + 2)
GREEDY = SamplingParams(temperature=0.0)

Step = Callable[[], object]


def plan(adapters: tuple[str, ...], *, decode: bool) -> StepPlan:
    """A step whose chunks have these adapters in turn; without any it is the plain one."""
    count = BATCH if decode else len(adapters) or 1
    length = 1 if decode else PROMPT // count
    start = CONTEXT if decode else 0
    per = -(-(start + length) // BLOCK)
    chunks = tuple(
        Chunk(
            str(i),
            start,
            tuple(range(100, 100 + length)),
            tuple(range(i * per, (i + 1) * per)),
            sample=True,
            params=GREEDY,
            output_len=1 if decode else 0,
            adapter=adapters[i % len(adapters)] if adapters else "",
        )
        for i in range(count)
    )
    return StepPlan(chunks)


def adapter(model: Any, folder: Path, rank: int, targets: str) -> None:
    """Save a random adapter."""
    wanted = targets if targets == "all-linear" else targets.split(",")
    config = peft.LoraConfig(r=rank, lora_alpha=16, target_modules=wanted, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(str(folder))
    wrapped.unload()


def peft_runner(path: str, folder: Path) -> TorchRunner:
    """A model of its own with one adapter, put in by PEFT."""
    loaded = load_model(path)
    wrapped = peft.PeftModel.from_pretrained(loaded.model, str(folder))
    wrapped.eval()
    return TorchRunner(loaded, ROOM, BLOCK, threads=1)


def runner(path: str, *, pack: bool = True) -> TorchRunner:
    """A runner as a worker has it."""
    model = ModelConfig(path=path, threads=1, cpu_kernels=pack)
    return TorchRunner.load(model, CacheConfig(kv_blocks=ROOM, block_size=BLOCK))


def measure(steps: dict[str, Step], rounds: int, repeat: int) -> dict[str, float]:
    """Median CPU seconds of each step, taken in turns."""
    seen: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            begun = time.process_time()
            for _ in range(repeat):
                step()
            if turn:
                seen[name].append((time.process_time() - begun) / repeat)
    return {name: statistics.median(times) for name, times in seen.items()}


def peft_ratio(times: dict[str, float]) -> float:
    """PEFT's step over the plain one on the same weights."""
    return times["peft, 1 adapter"] / times["not packed, none"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="all-linear")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            adapter(
                load_model(asked.model, pack=False).model,
                Path(folder, name),
                asked.rank,
                asked.targets,
            )
        bare, ours = runner(asked.model), runner(asked.model)
        unpacked = runner(asked.model, pack=False)
        for name in NAMES:
            ours.adapters.install(name, ours.adapters.read(str(Path(folder, name))))
        peers = peft_runner(asked.model, Path(folder, NAMES[0]))
        for decode in (True, False):
            kind = f"decode, batch {BATCH}" if decode else f"prefill {PROMPT}"
            steps: dict[str, Step] = {
                "no adapter loaded": lambda d=decode: bare.run(plan((), decode=d)),
                "4 loaded, none asked": lambda d=decode: ours.run(plan((), decode=d)),
                "1 adapter": lambda d=decode: ours.run(plan(NAMES[:1], decode=d)),
                "4 adapters": lambda d=decode: ours.run(plan(NAMES, decode=d)),
                "4 chunks, none asked": lambda d=decode: bare.run(plan(("",) * 4, decode=d)),
                "not packed, none": lambda d=decode: unpacked.run(plan((), decode=d)),
                "peft, 1 adapter": lambda d=decode: peers.run(plan((), decode=d)),
            }
            times = measure(steps, asked.rounds, 5 if decode else 1)
            base = times["no adapter loaded"]
            print(f"{kind}: {base * 1e3:.1f} ms of CPU without adapters")
            for name, seconds in times.items():
                print(f"  {name:22} {seconds / base:.3f}")
            print(f"  {'peft to not packed':22} {peft_ratio(times):.3f}")


if __name__ == "__main__":
    main()
