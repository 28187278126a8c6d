"""llama.cpp beside our runner: decode, prefill and a warm prompt, in turns, at context 512.

The peer is a subprocess with its own Python (``scripts/llama_peer.sh``), on as many threads.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.engine_report import Contest, Row
from worker.drive import Meter, Spent
from worker.probe import Probe, Sample

SCRIPT = Path(__file__).with_name("llama_peer.py")
CONTEXT, STEPS = 512, 12
MISSING = "peer missing: give --llama-python (scripts/llama_peer.sh makes it)"
BOUNDS = {
    "F32": {"batch-16 decode": (2.0, 2.3), "single-stream decode": (0.85, 0.95)},
    "Q8_0": {"batch-16 decode": (3.0, 3.5), "single-stream decode": (0.9, 1.1)},
}


class Llama:
    """The peer's process with one model."""

    def __init__(self, python: str, model: Path, threads: int) -> None:
        command = [python, "-P", str(SCRIPT), "--model", str(model), "--threads", str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": str(threads)},
        )
        self.version: str = self._answer()["version"]

    def ask(self, do: str, **what: int) -> Spent:
        """One measurement."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **what}), file=self._process.stdin, flush=True)
        answer = self._answer()
        return Spent(answer["wall"], answer["cpu"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the llama.cpp peer ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def make_models(python: str, folder: Path) -> None:
    """GGUF files in F32 and Q8_0, once."""
    subprocess.run([python, "-P", str(SCRIPT), "--make", str(folder)], check=True, text=True)


def against_llama(
    probe: Probe, python: str, model: Path, rounds: int, meter: Meter, ours: str
) -> Iterator[Row]:
    """Case f for one pair of weights; ``ours`` names our side."""
    kind = model.stem
    peer = Llama(python, model, threads=1)
    try:
        for name, (tokens, theirs, mine) in _pairs(probe, peer).items():
            mine()
            contest = Contest.run(
                rounds, {"llama.cpp": theirs, "headwater": lambda m=mine: m().spent}
            )
            must, goal = BOUNDS[kind].get(name, (None, None))
            detail = contest.detail(tokens) | {"llama_cpp_python": peer.version}
            rates = {who: detail[who]["tokens_per_cpu_s"] for who in ("headwater", "llama.cpp")}
            yield Row(
                "f",
                f"{name}, {ours} against llama.cpp {kind}",
                contest.ratio("headwater", "llama.cpp", meter),
                must,
                goal,
                by_wall=contest.ratio("headwater", "llama.cpp", "wall"),
                note=f"{rates['headwater']} / {rates['llama.cpp']} tok per CPU second",
                detail=detail,
            )
    finally:
        peer.close()


def _pairs(
    probe: Probe, peer: Llama
) -> dict[str, tuple[int, Callable[[], Spent], Callable[[], Sample]]]:
    """Per figure: tokens, the peer's turn, our turn."""

    def decode(batch: int) -> tuple[int, Callable[[], Spent], Callable[[], Sample]]:
        return (
            batch * STEPS,
            lambda: peer.ask("decode", batch=batch, context=CONTEXT, steps=STEPS),
            lambda: probe.decode(batch, CONTEXT, STEPS),
        )

    return {
        "batch-16 decode": decode(16),
        "single-stream decode": decode(1),
        "prefill 512": (512, lambda: peer.ask("prefill", tokens=512), lambda: probe.prefill(512)),
        "warm 48 on 2000": (
            48,
            lambda: peer.ask("warm", total=2048, cached=2000),
            lambda: probe.reuse(2048, 2000)[1],
        ),
    }


def missing(kind: str, ours: str, why: str) -> list[Row]:
    """The rows of a pair that cannot be measured."""
    return [
        Row("f", f"{name}, {ours} against llama.cpp {kind}", None, must, goal, note=why)
        for name, (must, goal) in BOUNDS[kind].items()
    ]
