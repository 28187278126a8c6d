"""The stages of ``bench/gpu_check.sh``. Each runs in a process of its own under a time limit.

A stage that fails or takes too long leaves a line in the table and does not stop the others. The
exit code is 1 if a stage whose name begins with ``correct`` fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

DRY: dict[str, Any] = {
    "device": "cpu",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "dim": 16,
    "vocab": 199,
    "prefill": (32, 64),
    "decode": (1, 4),
    "context": 40,
    "new": 4,
    "ttft": (96, 160),
    "batch": 4,
    "budget": 64,
}
REAL: dict[str, Any] = {
    "device": "cuda:0",
    "layers": 16,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 8,
    "dim": 128,
    "vocab": 32_000,
    "prefill": (512, 2048, 8192),
    "decode": (1, 8, 64),
    "context": 1024,
    "new": 64,
    "ttft": (8192, 32_768),
    "batch": 64,
    "budget": 4096,
}
BLOCK = 16
LOGITS_FP32, TIE_BF16 = 1e-3, 0.05
"""Largest relative distance of float32 logits from the CPU's; what counts as a near tie in bf16,
as a share of the spread of the row's logits."""


# ---- the model ----


def model_of(size: dict[str, Any], dtype: str, device: str, *, small: bool = False) -> Any:
    """A Llama-like model with random weights, the same for the same sizes."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(7)
    hidden = 256 if small and size is REAL else size["hidden"]
    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=3 if small else size["layers"],
        num_attention_heads=4 if small else size["heads"],
        num_key_value_heads=2 if small else size["kv_heads"],
        head_dim=size["dim"],
        max_position_embeddings=size["ttft"][-1] + 1024,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                weight.normal_(std=1.0 if "embed" in name else gain * weight.shape[-1] ** -0.5)
    return model.to(getattr(torch, dtype)).to(device).eval()


def runner_of(size: dict[str, Any], model: Any, tokens: int, *, graphs: bool = False) -> Any:
    """Our engine's runner with KV for so many tokens."""
    from worker.model.recorded import CudaRecorder
    from worker.model.runner import TorchRunner
    from worker.model.weights import describe

    threads = 1 if size is DRY else 0
    runner = TorchRunner(
        describe(model), tokens // BLOCK + 8, BLOCK, threads=threads, rng=Random(1)
    )
    runner.check()
    if graphs:
        runner.record_decodes(CudaRecorder(model.device) if model.device.type == "cuda" else _same)
    return runner


def _same(step: Any) -> Any:
    return step


def prompt(size: dict[str, Any], length: int, seed: int) -> list[int]:
    """Random tokens."""
    return Random(seed).choices(range(1, size["vocab"]), k=length)


class Engine:
    """Scheduler and runner, step by step."""

    def __init__(self, size: dict[str, Any], runner: Any, *, caching: bool = True) -> None:
        from shared.paging import BlockPool
        from worker.scheduler import Scheduler

        self.runner, self.count = runner, 0
        self.pool = BlockPool(runner.n_blocks, BLOCK, caching=caching)
        self.scheduler = Scheduler(
            self.pool,
            max_batch_tokens=size["budget"],
            max_running=256,
            max_model_len=runner.max_model_len,
            eos_token_ids=frozenset(),
            max_waiting=10_000,
        )

    def add(self, tokens: Sequence[int], new: int) -> Any:
        """Queue a greedy request."""
        from worker.sequence import SamplingParams
        from worker.sequence import Sequence as Seq

        self.count += 1
        seq = Seq(
            id=str(self.count),
            tokens=list(tokens),
            prompt_len=len(tokens),
            params=SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True),
            scope_root=b"g" * 16,
            arrived=0.0,
        )
        self.scheduler.add(seq)
        return seq

    def steps(self) -> Iterator[Any]:
        """Plans, until nothing is left; each is run when the next is asked for."""
        while (plan := self.scheduler.plan()) is not None:
            self.scheduler.commit(plan, self.runner.run(plan))
            yield plan

    def run(self) -> None:
        """Until nothing is left."""
        for _ in self.steps():
            self.pool.drain_events()


def now(device: Any) -> float:
    """Seconds, after the device has done what it was given."""
    import torch

    if str(device).startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


# ---- stages ----


def environment(size: dict[str, Any]) -> dict[str, Any]:
    """What is installed, and which attention kernel the probe takes."""
    import torch
    import transformers

    runner = runner_of(size, model_of(size, _half(size), size["device"], small=True), 4096)
    cuda = size["device"] != "cpu"
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name(0) if cuda else "none",
        "attention_kernel": runner.kernel.name if runner.kernel else "each sequence alone",
    }


def _half(size: dict[str, Any]) -> str:
    return "float32" if size["device"] == "cpu" else "bfloat16"


def correct_logits(size: dict[str, Any]) -> dict[str, Any]:
    """float32 logits on the device against transformers on the CPU, chunked and in one piece."""
    import torch

    reference, ours = (model_of(size, "float32", d, small=True) for d in ("cpu", size["device"]))
    tokens = prompt(size, 300, 1)
    with torch.inference_mode():
        wanted = reference(input_ids=torch.tensor([tokens])).logits[0, -1]
    runner, worst = runner_of(size, ours, 2048), 0.0
    from worker.runner import Chunk, StepPlan
    from worker.sequence import SamplingParams

    for step in (300, 64, 7):
        for start in range(0, 300, step):
            part = tuple(tokens[start : start + step])
            blocks = tuple(reversed(range(19))) if step == 7 else tuple(range(19))
            chunk = Chunk("x", start, part, blocks, True, SamplingParams(temperature=0.0))
            logits = runner.logits(StepPlan((chunk,)))[0].cpu()
        worst = max(worst, float((logits - wanted).norm() / wanted.norm()))
    return {"ok": worst < LOGITS_FP32, "worst_relative_distance": worst}


def correct_tokens(size: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens in half precision: cold, in company, warm and replayed; may differ at ties."""
    import torch

    model = model_of(size, _half(size), size["device"], small=True)
    reference = model_of(size, "float32", "cpu", small=True)
    prompts = [prompt(size, n, n) for n in (40, 333, 90, 17, 200)]
    answers: dict[str, list[list[int]]] = {}
    for name, graphs in (("eager", False), ("replayed", True)):
        runner = runner_of(size, model, 8192, graphs=graphs)
        engine = Engine(size, runner)
        for round_ in ("cold", "warm"):
            seqs = [engine.add(tokens, 16) for tokens in prompts]
            engine.run()
            answers[f"{name} {round_}"] = [
                s.tokens[len(p) :] for s, p in zip(seqs, prompts, strict=True)
            ]
        if graphs and runner.recorded.replays == 0:
            return {"ok": False, "why": "no decode step was replayed"}
    bad, ties = [], 0
    for name, got in answers.items():
        for tokens, answer in zip(prompts, got, strict=True):
            with torch.inference_mode():
                rows = reference(input_ids=torch.tensor([[*tokens, *answer]])).logits[0]
            for place, token in enumerate(answer):
                row = rows[len(tokens) - 1 + place]
                behind = float((row.max() - row[token]) / row.std())
                ties += behind > 0
                if behind > TIE_BF16:
                    bad.append(f"{name}: {behind:.3f} behind at {place}")
    return {"ok": not bad, "near_ties": ties, "divergences": bad[:5]}


def prefill(size: dict[str, Any]) -> dict[str, Any]:
    """Prompt tokens a second."""
    runner = runner_of(size, model_of(size, _half(size), size["device"]), size["prefill"][-1] * 2)
    found = {}
    for length in size["prefill"]:
        engine = Engine(size, runner, caching=False)
        seconds = []
        for round_ in range(3):
            engine.add(prompt(size, length, round_), 1)
            started = now(size["device"])
            engine.run()
            seconds.append(now(size["device"]) - started)
        found[f"prefill {length}, tok/s"] = round(length / min(seconds))
    return found


def _decode(size: dict[str, Any], *, graphs: bool) -> dict[str, Any]:
    tokens = size["batch"] * (size["context"] + size["new"] + 2 * BLOCK)
    runner = runner_of(size, model_of(size, _half(size), size["device"]), tokens, graphs=graphs)
    found = {}
    for batch in size["decode"]:
        engine = Engine(size, runner, caching=False)
        for line in range(batch):
            engine.add(prompt(size, size["context"], line), size["new"])
        seconds, last = [], now(size["device"])
        for plan in engine.steps():
            at = now(size["device"])
            if plan.kind == "decode" and len(plan.chunks) == batch:
                seconds.append(at - last)
            last = at
        found[f"decode batch {batch}, tok/s"] = round(batch / statistics.median(seconds))
    return found


def decode(size: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of decode steps."""
    return _decode(size, graphs=False)


def decode_graphs(size: dict[str, Any]) -> dict[str, Any]:
    """The same, replayed."""
    return _decode(size, graphs=True)


def ttft(size: dict[str, Any]) -> dict[str, Any]:
    """Time to the first token of a long prompt, cold and with all but 48 tokens cached."""
    longest = size["ttft"][-1]
    runner = runner_of(size, model_of(size, _half(size), size["device"]), 2 * longest)
    engine, found = Engine(size, runner), {}
    engine.add(prompt(size, 64, 0), 1)
    engine.run()
    for length in size["ttft"]:
        tokens, times = prompt(size, length, length), []
        for end in (prompt(size, 48, 1), prompt(size, 48, 2)):
            seq = engine.add([*tokens[:-48], *end], 1)
            started = now(size["device"])
            engine.run()
            times.append(now(size["device"]) - started)
        found[f"TTFT {length} cold, ms"] = round(1000 * times[0], 1)
        found[f"TTFT {length} warm, ms"] = round(1000 * times[1], 1)
        found[f"TTFT {length} cached"] = seq.cached
    return found


def _throughput(size: dict[str, Any], run: Callable[[list[list[int]]], None]) -> dict[str, Any]:
    prompts = [prompt(size, size["context"] // 4, i) for i in range(size["batch"])]
    seconds = []
    for _ in range(2):
        started = now(size["device"])
        run(prompts)
        seconds.append(now(size["device"]) - started)
    return {"batch, new tok/s": round(size["batch"] * size["new"] / min(seconds))}


def batch_ours(size: dict[str, Any]) -> dict[str, Any]:
    """A whole batch, prompts included, as the peers below do it."""
    tokens = size["batch"] * (size["context"] // 4 + size["new"] + 2 * BLOCK)
    graphs = size["device"] != "cpu"
    model = model_of(size, _half(size), size["device"])
    runner = runner_of(size, model, tokens, graphs=graphs)

    def run(prompts: list[list[int]]) -> None:
        engine = Engine(size, runner, caching=False)
        for tokens in prompts:
            engine.add(tokens, size["new"])
        engine.run()

    return _throughput(size, run)


def batch_generate(size: dict[str, Any]) -> dict[str, Any]:
    """transformers' ``generate`` on the same batch."""
    import torch

    model = model_of(size, _half(size), size["device"])

    def run(prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts, device=model.device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=size["new"],
            min_new_tokens=size["new"],
            do_sample=False,
        )

    return _throughput(size, run)


def batch_continuous(size: dict[str, Any]) -> dict[str, Any]:
    """transformers' own continuous batching on the same batch."""
    from transformers import GenerationConfig

    model = model_of(size, _half(size), size["device"])
    config = GenerationConfig(
        max_new_tokens=size["new"], do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    return _throughput(
        size, lambda prompts: model.generate_batch(inputs=prompts, generation_config=config)
    )


def batch_vllm(size: dict[str, Any]) -> dict[str, Any]:
    """vLLM on the same batch and weights, where it is installed."""
    import tempfile

    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model_of(size, _half(size), "cpu").save_pretrained(folder)
        llm = LLM(folder, skip_tokenizer_init=True, enable_prefix_caching=False)
        params = SamplingParams(temperature=0, max_tokens=size["new"], ignore_eos=True)
        params.detokenize = False
        asked: Callable[[list[list[int]]], None] = lambda prompts: llm.generate(  # noqa: E731
            [{"prompt_token_ids": tokens} for tokens in prompts], params
        )
        return _throughput(size, asked)


STAGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], int]] = {
    "environment": (environment, 40),
    "correct logits": (correct_logits, 50),
    "correct tokens": (correct_tokens, 60),
    "prefill": (prefill, 40),
    "decode": (decode, 50),
    "decode, replayed": (decode_graphs, 60),
    "ttft": (ttft, 50),
    "ours": (batch_ours, 40),
    "transformers generate": (batch_generate, 35),
    "transformers continuous batching": (batch_continuous, 35),
}
"""Seconds are limits: 460 together. vLLM, where it is there, gets what is left of 480."""


def run_stage(name: str, seconds: float, *, dry: bool) -> dict[str, Any]:
    """A stage in a process of its own; what it found, or why not."""
    command = [sys.executable, "-P", __file__, "--stage", name, *(["--dry-run"] if dry else [])]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds * (5 if dry else 1),
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"over its limit of {seconds:.0f} s"}
    lines = (done.stdout.strip() or "\n").splitlines()
    if done.returncode or not lines[-1].startswith("{"):
        return {"failed": (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]}
    return json.loads(lines[-1])


def main() -> int:
    """Run the stages, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--stage", help="run this one here, printing JSON")
    parser.add_argument("--only", help="comma-separated stages")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    stages = dict(STAGES)
    stages["vLLM"] = (batch_vllm, 120)
    if args.stage:
        print(json.dumps(stages[args.stage][0](DRY if args.dry_run else REAL)))
        return 0
    if not args.dry_run:
        import torch

        if not torch.cuda.is_available():
            print("no CUDA device here; --dry-run checks the script itself", file=sys.stderr)
            return 2
    found: dict[str, Any] = {}
    started = time.perf_counter()
    wanted = args.only.split(",") if args.only else list(stages)
    for name in wanted:
        left = 480 - (time.perf_counter() - started)
        limit = stages[name][1] if args.dry_run else min(stages[name][1], max(1, left))
        found[name] = run_stage(name, limit, dry=args.dry_run)
        print(f"{name}", flush=True)
        for key, value in found[name].items():
            print(f"    {key:<40} {value}", flush=True)
    found["seconds"] = round(time.perf_counter() - started)
    text = json.dumps({"dry_run": args.dry_run, **found})
    print(text)
    if args.out:
        args.out.write_text(text)
    right = [found[name].get("ok") for name in wanted if name.startswith("correct")]
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
