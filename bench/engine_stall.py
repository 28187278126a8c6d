"""Case e: how long decoding neighbours wait while a long prompt is computed, and what that costs.

Each setting gets four decoding neighbours and a prompt of 2,048 tokens. The stall is the longest
time between two tokens of a neighbour. The speed is the prompt's, relative to the same prompt alone
with the largest budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.engine_report import Row
from worker.drive import Meter, Spent
from worker.probe import Probe

PROMPT, NEIGHBOURS, CONTEXT = 2048, 4, 512
BUDGETS = (32, 64, 128, 256, 512, 1024, 2048)
STEP_MS = (100.0, 250.0, 500.0)
LEARNING = 512
"""Tokens of a prompt that goes before, from which a time budget learns the pace."""


@dataclass(frozen=True)
class Point:
    """One setting, once."""

    stall: Spent
    prefill: Spent


def point(probe: Probe, budget: int, step_ms: float, pace: float) -> Point:
    """Measure one setting. ``pace``: seconds a token, which a pretended step reports."""
    drive = probe.drive(budget=budget, running=NEIGHBOURS + 1, step_ms=step_ms)
    drive.runner.pretended_s_per_token = pace
    neighbours = drive.decoders(NEIGHBOURS, CONTEXT, 4 * PROMPT, probe.rng)
    if step_ms:
        drive.step(4)
        drive.until_first(drive.submit(drive.random(LEARNING, probe.rng), 1))
    drive.step()
    before = [len(neighbour.at) - 1 for neighbour in neighbours]
    long = drive.submit(drive.random(PROMPT, probe.rng), 1)
    started = probe.clock()
    drive.until_first(long)
    spent = probe.clock() - started
    for neighbour, settled in zip(neighbours, before, strict=True):
        del neighbour.at[:settled]
    gaps = [neighbour.longest_gap for neighbour in neighbours]
    stall = Spent(max(gap.wall for gap in gaps), max(gap.cpu for gap in gaps))
    return Point(stall, spent)


def stalls(probe: Probe, rounds: int, meter: Meter) -> list[Row]:
    """The whole curve, then the rule for ``--max-step-ms``."""
    settings = [(budget, 0.0) for budget in BUDGETS] + [(max(BUDGETS), ms) for ms in STEP_MS]
    alone = [probe.prefill(PROMPT, budget=max(BUDGETS)).spent for _ in range(rounds)]
    full = Spent(min(s.wall for s in alone), min(s.cpu for s in alone))
    seen: dict[tuple[int, float], list[Point]] = {setting: [] for setting in settings}
    for _ in range(rounds):
        for setting, points in seen.items():
            points.append(point(probe, *setting, pace=full.wall / PROMPT))
    return [
        _row(budget, step_ms, points, full, meter) for (budget, step_ms), points in seen.items()
    ]


def _row(budget: int, step_ms: float, points: list[Point], full: Spent, meter: Meter) -> Row:
    stall = {m: min(p.stall.by(m) for p in points) for m in ("wall", "cpu")}  # type: ignore[arg-type]
    speed = full.by(meter) / min(p.prefill.by(meter) for p in points)
    tokens = PROMPT / min(p.prefill.by(meter) for p in points)
    note = f"prefill at {speed:.0%} of its full speed, {tokens:.0f} tok/s"
    detail = {
        "stalls_s": [{"wall": p.stall.wall, "cpu": p.stall.cpu} for p in points],
        "prefill_s": [{"wall": p.prefill.wall, "cpu": p.prefill.cpu} for p in points],
    }
    if not step_ms:
        return Row(
            "e",
            f"longest stall of {NEIGHBOURS} neighbours, budget {budget} tokens",
            1e3 * stall[meter],
            unit="ms",
            less_is_better=True,
            by_wall=1e3 * stall["wall"],
            note=note,
            detail=detail,
        )
    return Row(
        "e",
        f"longest stall with --max-step-ms {step_ms:.0f}, relative to it",
        1e3 * stall["wall"] / step_ms,
        1.2,
        less_is_better=True,
        by_wall=1e3 * stall["wall"] / step_ms,
        note=f"{1e3 * stall['wall']:.0f} ms by wall, which is what it promises; {note}",
        detail=detail,
    )
