"""Cases of ``bench/engine.py`` that need no peer but a bound or a count."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median

from bench.engine_report import Contest, Row
from worker.drive import Meter
from worker.probe import ModelShape, Probe

TOTAL, CACHED = 2048, 2000
DECODES = ((1, 512), (16, 512), (64, 320))
"""Batches of case c and their contexts."""
STEPS = 10


def reuse(probe: Probe, shape: ModelShape | None, rounds: int, meter: Meter) -> list[Row]:
    """Case b: first token of a prompt of which ``CACHED`` tokens are in the cache."""
    assert shape is not None, "the FLOP ideal is that of a dense model"
    probe.reuse(256, 128)
    pairs = [probe.reuse(TOTAL, CACHED) for _ in range(rounds)]
    contest = Contest(
        {"cold": [cold.spent for cold, _ in pairs], "warm": [warm.spent for _, warm in pairs]}
    )
    ideal = shape.ideal_ratio(TOTAL, CACHED)
    ratio = contest.ratio("warm", "cold", meter)
    return [
        Row(
            "b",
            f"cold / warm first token, {CACHED} of {TOTAL} cached, in % of the FLOP ideal",
            100 * ratio / ideal,
            80,
            90,
            "%",
            by_wall=100 * contest.ratio("warm", "cold", "wall") / ideal,
            note=f"{ratio:.1f}x of {ideal:.1f}x",
            detail=contest.detail() | {"ratio": round(ratio, 2), "ideal": round(ideal, 2)},
        )
    ]


def outside(probe: Probe, rounds: int, meter: Meter) -> list[Row]:
    """Case c: planning, batch building, sampling and hand-off, as a share of the steps."""
    shapes = {}
    for batch, context in DECODES:
        room = probe.runner.n_blocks * probe.runner.block_size
        assert batch * (context + 2 * STEPS) < room, "some would wait while others decode"
        shapes[f"{batch} decodes at {context} tokens"] = partial(
            probe.decode, batch, context, STEPS
        )
    shapes["16 decodes beside a prompt of 1,024"] = partial(probe.mixed, 16, 512, 1024)
    rows = []
    for name, measure in shapes.items():
        samples = [measure() for _ in range(rounds)]
        rows.append(
            Row(
                "c",
                f"share of a step outside the forward pass, {name}",
                100 * median(sample.outside(meter) for sample in samples),
                1.0,
                0.5,
                "%",
                less_is_better=True,
                by_wall=100 * median(sample.outside("wall") for sample in samples),
                note=f"{median(sample.per_s(meter) for sample in samples):.1f} tok/s",
                detail={
                    "cpu_s": [sample.spent.cpu for sample in samples],
                    "forward_cpu_s": [sample.forward.cpu for sample in samples],
                },
            )
        )
    return rows


def siblings(probe: Probe) -> list[Row]:
    """Case g: prompt tokens computed for requests that arrive together and share a prefix."""
    drive = probe.drive()
    prefix, n, own = drive.random(768, probe.rng), 8, 32
    drive.runner.computing = False
    for _ in range(n):
        drive.submit(prefix + drive.random(own, probe.rng), 8)
    drive.run()
    computed = drive.scheduler.counters.computed_tokens
    times = (computed - n * own) / len(prefix)
    return [
        Row(
            "g",
            f"{n} siblings that arrive together compute their shared prefix so many times",
            times,
            1.0,
            1.0,
            less_is_better=True,
            note=f"{computed} prompt tokens computed, {n * (len(prefix) + own)} asked",
            detail={"computed": computed, "held_back": drive.scheduler.counters.held_back},
        )
    ]


def equality(model: str, scale: float) -> list[Row]:
    """Case h: ``bench/equality.py`` as it is, in a process of its own."""
    script = Path(__file__).with_name("equality.py")
    command = [sys.executable, "-P", str(script), "--model", model, "--scale", str(scale)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found = json.loads(done.stdout) if done.stdout else None
    title = "greedy answers that differ from generate()'s, near ties included"
    if found is None:
        return [Row("h", title, None, 1.0, unit="%", note=f"equality.py ended {done.returncode}")]
    apart = found["divergences"]
    real = sum(not d["near_tie"] for d in apart)
    return [
        Row(
            "h",
            title,
            100 * len(apart) / found["cases"],
            1.0,
            0.0,
            "%",
            less_is_better=True,
            note=f"{found['equal']} of {found['cases']} equal, {real} not near ties, "
            f"logits within {found['worst_relative_logits']}, a spoilt block changes "
            f"{100 * found['spoilt_block_changes']:.0f} %",
            detail=found,
        ),
        Row("h", "all bounds of bench/equality.py hold", float(found["ok"]), 1.0, unit=""),
    ]


def on_cuda() -> list[Row]:
    """What needs another machine."""
    why = "needs a CUDA device; this command measures one CPU thread"
    return [
        Row("i", "decode at batch 64 on CUDA against continuous batching", None, 1.5, note=why),
        Row("i", "decode at batch 64 on CUDA against vLLM", None, 0.5, 0.8, note=why),
    ]
