"""Decode attention in a pool that a long random history has fragmented (case d)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

from torch import Tensor
from transformers import AttentionInterface

from bench.engine_report import Row
from worker.drive import NO_TIME, Answer, Drive, Meter, Spent
from worker.model.attention import ATTENTION, paged_attention, register
from worker.model.cpu_layer import LayerForward
from worker.model.measure import Reading, TimedRunner, clock
from worker.probe import ModelShape, Probe

HISTORY = 1500
"""Requests that come and go before the measurement."""
RUNNING = 24
STEPS = 3
LONGEST = 1500
ENDLESS = 4000
"""New tokens of an answer that does not end here."""


class TimedAttention:
    """A watch on the attention of whole steps of decodes: on the registered function, where the
    writing of new KV counts too, and on what stands in for it where C code computes the layers."""

    def __init__(self, layers: LayerForward | None) -> None:
        self._layers = layers
        self._registered = NO_TIME
        self._in_c = (ctypes.c_double * 2)()

    @property
    def spent(self) -> Spent:
        """So far."""
        return self._registered + Spent(*self._in_c)

    def registered(self, *args: Any, **context: Any) -> tuple[Tensor, None]:
        """In place of the registered function."""
        started = clock()
        out = paged_attention(*args, **context)
        self._registered += clock() - started
        return out

    def __enter__(self) -> TimedAttention:
        AttentionInterface.register(ATTENTION, self.registered)
        if self._layers is not None:
            self._layers.attention_time = self._in_c
        return self

    def __exit__(self, *_: object) -> None:
        if self._layers is not None:
            self._layers.attention_time = None
        register()


def fragmented(probe: Probe, use: float, history: int, rng: Random) -> Drive:
    """An engine after ``history`` requests of all lengths, whose decodes hold ``use`` of the pool.

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

    for _ in range(history):
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
    probe: Probe, runner: TimedRunner, reading: Reading, rounds: int, meter: Meter
) -> list[Row]:
    """Case d: KV bytes that decode attention reads a second, against what memory gives around each
    step."""
    shape, layers = runner.shape, runner.by_layers
    assert shape is not None
    settings = [("in a fresh pool", 0.9, 0, None), ("pool 90 % used", 0.9, HISTORY, 0.9)]
    settings.append(("pool 98 % used", 0.98, HISTORY, 0.9))
    rows = []
    for name, use, history, bound in settings:
        growth = RUNNING * (2 + STEPS * rounds) / probe.runner.block_size
        drive = fragmented(probe, use - growth / probe.runner.n_blocks, history, Random(7))
        seen = _attended(drive, layers, reading, rounds)
        rows.append(_row(name, bound, seen, shape, meter))
    return rows


@dataclass(frozen=True)
class _Attended:
    """Decode steps in one pool, each between two measurements of memory: a machine may change its
    speed from one second to the next."""

    spent: list[Spent]
    read_rates: list[float]
    """Of memory, bytes a second: the mean of those before and after each step."""
    contexts: list[list[int]]
    mean_run: float
    """Blocks of a sequence that follow one another in memory."""
    pool_use: float

    def shares(self, bytes_per_token: int, meter: Meter) -> list[float]:
        """Of memory's rate, what each step's attention reached."""
        steps = zip(self.spent, self.read_rates, self.contexts, strict=True)
        return [
            sum(lengths) * bytes_per_token / spent.by(meter) / rate
            for spent, rate, lengths in steps
        ]


def _attended(
    drive: Drive, layers: LayerForward | None, reading: Reading, rounds: int
) -> _Attended:
    drive.step(2)
    chunks = drive.runner.latest.chunks
    runs = sum(1 + sum(b != a + 1 for a, b in pairwise(chunk.blocks)) for chunk in chunks)
    mean_run = sum(len(chunk.blocks) for chunk in chunks) / runs
    spent, contexts, read = [], [], [reading.rate(repeats=1)]
    for _ in range(STEPS * rounds):
        with TimedAttention(layers) as watch:
            drive.step()
        spent.append(watch.spent)
        contexts.append([c.start + len(c.tokens) for c in drive.runner.latest.chunks])
        read.append(reading.rate(repeats=1))
    around = [(before + after) / 2 for before, after in pairwise(read)]
    return _Attended(spent, around, contexts, mean_run, drive.pool.n_used / drive.pool.n_blocks)


def _row(name: str, bound: float | None, seen: _Attended, shape: ModelShape, meter: Meter) -> Row:
    title = f"decode attention against memory's read rate, {name}"
    if NO_TIME in seen.spent:
        why = "attention does not go through the registered function"
        return Row("d", title, None, bound, bound, note=why)
    shares = seen.shares(shape.kv_bytes_per_token, meter)
    share, rate = median(shares), median(seen.read_rates)
    return Row(
        "d",
        title,
        share,
        bound,
        bound,
        by_wall=median(seen.shares(shape.kv_bytes_per_token, "wall")),
        note=f"{share * rate / 1e9:.1f} of {rate / 1e9:.1f} GB/s in the median of "
        f"{len(shares)} steps; {len(seen.contexts[0])} sequences, "
        f"{seen.mean_run:.1f} blocks in a row",
        detail={"tokens": sum(seen.contexts[0]), "pool_use": seen.pool_use, "steps": shares},
    )
