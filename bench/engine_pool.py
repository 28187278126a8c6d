"""Decode attention in a pool that a long random history has fragmented (case d)."""

from __future__ import annotations

from random import Random
from typing import Any

from torch import Tensor
from transformers import AttentionInterface

from bench.engine_report import Row
from worker.drive import NO_TIME, Answer, Drive, Meter, Spent
from worker.model.attention import ATTENTION, paged_attention, register
from worker.model.measure import clock
from worker.probe import ModelShape, Probe

HISTORY = 1500
"""Requests that come and go before the measurement."""
RUNNING = 24
STEPS = 3
LONGEST = 1500
ENDLESS = 4000
"""New tokens of an answer that does not end here."""


class TimedAttention:
    """The registered attention function with a watch; the writing of new KV counts too."""

    def __init__(self) -> None:
        self.spent = NO_TIME

    def __call__(self, *args: Any, **context: Any) -> tuple[Tensor, None]:
        started = clock()
        out = paged_attention(*args, **context)
        self.spent += clock() - started
        return out

    def __enter__(self) -> TimedAttention:
        AttentionInterface.register(ATTENTION, self)
        return self

    def __exit__(self, *_: object) -> None:
        register()


def fragmented(probe: Probe, use: float, rng: Random) -> Drive:
    """An engine after ``HISTORY`` requests of all lengths, whose decodes hold ``use`` of the pool.

    A third of the prompts go on from one of a few openings, as chats do.
    """
    drive = probe.drive(budget=4096, running=RUNNING)
    drive.runner.computing = False
    openings = [drive.random(rng.randrange(32, 256), rng) for _ in range(12)]
    live: list[Answer] = []

    def arrive(longest: int, new: int) -> None:
        opening = rng.choice(openings) if rng.random() < 1 / 3 else ()
        prompt = opening + drive.random(rng.randrange(16, longest), rng)
        live.append(drive.submit(prompt, new))

    for _ in range(HISTORY):
        while len(live) >= RUNNING - 4:
            drive.step()
            live[:] = [answer for answer in live if not answer.ended]
        arrive(LONGEST, rng.randrange(8, 200))
    _fill(drive, use, rng)
    drive.runner.computing = True
    return drive


def _fill(drive: Drive, use: float, rng: Random) -> None:
    """Let the history end, and long answers take its place until ``use`` of the pool is held."""
    target = use * drive.pool.n_blocks
    while drive.pool.n_used < target:
        if not drive.scheduler.load().waiting:
            room = round(target - drive.pool.n_used) * drive.pool.block_size
            longest = max(17, min(LONGEST, room))
            drive.submit(drive.random(rng.randrange(16, longest), rng), ENDLESS)
        drive.step()


def bandwidth(
    probe: Probe, shape: ModelShape | None, read_rate: float, rounds: int, meter: Meter
) -> list[Row]:
    """KV bytes that decode attention reads a second, against what memory gives."""
    assert shape is not None
    rows = []
    for use in (0.9, 0.98):
        growth = RUNNING * (2 + STEPS * rounds) / probe.runner.block_size
        drive = fragmented(probe, use - growth / probe.runner.n_blocks, Random(7))
        runner: Any = probe.runner
        best = Spent(float("inf"), float("inf"))
        drive.step(2)
        before = (runner.counts.views, runner.counts.gathers)
        contexts = [chunk.start + len(chunk.tokens) for chunk in drive.runner.latest.chunks]
        for _ in range(rounds):
            with TimedAttention() as watch:
                drive.step(STEPS)
            if watch.spent == NO_TIME:
                raise RuntimeError("attention no longer goes through the registered function")
            best = Spent(min(best.wall, watch.spent.wall), min(best.cpu, watch.spent.cpu))
        held = drive.pool.n_used / drive.pool.n_blocks
        moved = STEPS * sum(contexts) * shape.kv_bytes_per_token
        views, gathers = runner.counts.views - before[0], runner.counts.gathers - before[1]
        rows.append(
            Row(
                "d",
                f"decode attention against memory's read rate, pool {100 * use:.0f} % used",
                moved / best.by(meter) / read_rate,
                0.9,
                0.9,
                by_wall=moved / best.wall / read_rate,
                note=f"{moved / best.by(meter) / 1e9:.1f} of {read_rate / 1e9:.1f} GB/s; "
                f"{views / (views + gathers):.0%} of the sequences lie in one piece",
                detail={"sequences": len(contexts), "tokens": sum(contexts), "pool_use": held},
            )
        )
    return rows
