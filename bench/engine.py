"""The worker's speed against its peers and bounds, all measured in this run.

Through scheduler, pool and runner, without HTTP; SmolLM2-135M in float32 on one thread; contestants
take turns and the best round of each counts. The verdict is by CPU seconds, because other work on
the machine disturbs them least; the figure by wall clock stands beside it.

    python bench/engine.py --llama-python /path/to/venv/bin/python     # everything
    python bench/engine.py --only a,b,f --rounds 1 --format json

a throughput beside transformers  b reuse beside its FLOP ideal  c share outside the forward pass
d attention's bandwidth  e stalls under a long prefill  f llama.cpp  g siblings  h greedy equality
i what needs a GPU
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import engine_cases as cases
from bench import engine_llama as llama
from bench.engine_peers import throughput
from bench.engine_pool import bandwidth
from bench.engine_report import Row, show
from bench.engine_stall import stalls
from worker.config import CacheConfig, ModelConfig
from worker.drive import Meter
from worker.model.fetch import cache_root
from worker.model.measure import Reading, TimedRunner, clock, gemm_rate
from worker.probe import Probe

BLOCKS = 1600
"""Of 16 tokens: 1.2 GB of KV memory."""
INT8_BLOCKS = 700


class Bench:
    """What the cases share. The peers' copy of the weights is loaded when first needed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rounds: int = args.rounds
        self.model: str = args.model
        self.meter: Meter = args.by
        self.llama_python: str | None = args.llama_python
        self.scale: float = args.equality_scale
        self.runner, self.probe = self.load("none", BLOCKS)
        self.reading = Reading(self.runner.device, self.meter)

    def load(self, quantize: Literal["none", "int8"], blocks: int) -> tuple[TimedRunner, Probe]:
        """Our worker's model as it is, or quantised."""
        model = ModelConfig(
            path=self.model, device="cpu", dtype="float32", threads=1, quantize=quantize
        )
        runner = TimedRunner.load(model, CacheConfig(kv_blocks=blocks), progress=say)
        runner.write_noise(blocks)
        probe = Probe(runner, clock, runner.forward)
        probe.prefill(64)
        return runner, probe

    def plain(self) -> Any:
        """An untouched copy of the model."""
        model = AutoModelForCausalLM.from_pretrained(
            self.runner.source, dtype=torch.float32, attn_implementation="sdpa"
        )
        return model.train(False)

    def about(self) -> dict[str, Any]:
        """Of this run."""
        gemm = gemm_rate(self.runner.device, self.runner.dtype, self.meter)
        return {
            "judged by": self.meter,
            "rounds": self.rounds,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cpu": _cpu(),
            "read GB/s": round(self.reading.rate() / 1e9, 1),
            "GEMM GFLOP/s": round(gemm / 1e9),
        }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def say(what: str) -> None:
    """Progress, on stderr."""
    print(f"{time.strftime('%H:%M:%S')}  {what}", file=sys.stderr, flush=True)


def against_llama(bench: Bench) -> Iterator[Row]:
    """Case f, both pairs."""
    python = bench.llama_python
    if python is None:
        yield from llama.missing("F32", "fp32", llama.MISSING)
        yield from llama.missing("Q8_0", "int8", llama.MISSING)
        return
    folder = cache_root("") / "llama-peer"
    llama.make_models(python, folder)
    rounds, meter = bench.rounds, bench.meter
    f32, q8 = folder / "F32.gguf", folder / "Q8_0.gguf"
    yield from llama.against_llama(bench.probe, python, f32, rounds, meter, "fp32")
    _, quantised = bench.load("int8", INT8_BLOCKS)
    yield from llama.against_llama(quantised, python, q8, rounds, meter, "int8")


CASES: dict[str, Callable[[Bench], Iterable[Row]]] = {
    "a": lambda b: throughput(b.probe, b.plain(), b.rounds, b.meter),
    "b": lambda b: cases.reuse(b.probe, b.runner.shape, b.rounds, b.meter),
    "c": lambda b: cases.outside(b.probe, b.rounds, b.meter),
    "d": lambda b: bandwidth(b.probe, b.runner, b.reading, b.rounds, b.meter),
    "e": lambda b: stalls(b.probe, b.rounds, b.meter),
    "f": against_llama,
    "g": lambda b: cases.siblings(b.probe),
    "h": lambda b: cases.equality(b.model, b.scale),
    "i": lambda b: cases.on_cuda(),
}


def run_case(bench: Bench, name: str) -> Iterator[Row]:
    """Its rows; what breaks is a row too, so that an hour's work is not lost."""
    try:
        yield from CASES[name](bench)
    except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as error:
        yield Row(name, "the rest of this case", None, 0.0, note=f"failed: {error}")


def main() -> int:
    """Run the cases; exit code 1 if a *must* is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", default=",".join(CASES), help="cases, e.g. a,b,f")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--by", choices=("cpu", "wall"), default="cpu", help="judge by these")
    parser.add_argument("--llama-python", help="Python of a venv with llama-cpp-python")
    parser.add_argument("--equality-scale", type=float, default=1.0)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    bench = Bench(args)
    rows: list[Row] = []
    for name in wanted:
        say(f"case {name}")
        for row in run_case(bench, name):
            say(f"{row.figure}: {row.value_text} {row.status} ({row.note})")
            rows.append(row)
    show(rows, bench.about(), args.format)
    return 1 if any(row.status == "missed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
