"""Decode attention in a pool that a long random history has fragmented (case d)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from random import Random
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
    """Case d: KV bytes that decode attention reads a second, against what memory gives in the same
    minute."""
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
    """The best round of ``STEPS`` decode steps in one pool."""

    spent: Spent
    read_rate: float
    """Of memory, bytes a second: the best of what was measured before each round."""
    contexts: list[int]
    mean_run: float
    """Blocks of a sequence that follow one another in memory."""
    pool_use: float


def _attended(
    drive: Drive, layers: LayerForward | None, reading: Reading, rounds: int
) -> _Attended:
    drive.step(2)
    chunks = drive.runner.latest.chunks
    runs = sum(1 + sum(b != a + 1 for a, b in pairwise(chunk.blocks)) for chunk in chunks)
    spent, read = [], []
    for _ in range(rounds):
        read.append(reading.rate(repeats=2))
        with TimedAttention(layers) as watch:
            drive.step(STEPS)
        spent.append(watch.spent)
    return _Attended(
        Spent(min(s.wall for s in spent), min(s.cpu for s in spent)),
        max(read),
        [chunk.start + len(chunk.tokens) for chunk in chunks],
        sum(len(chunk.blocks) for chunk in chunks) / runs,
        drive.pool.n_used / drive.pool.n_blocks,
    )


def _row(name: str, bound: float | None, seen: _Attended, shape: ModelShape, meter: Meter) -> Row:
    title = f"decode attention against memory's read rate, {name}"
    if seen.spent == NO_TIME:
        why = "attention does not go through the registered function"
        return Row("d", title, None, bound, bound, note=why)
    moved = STEPS * sum(seen.contexts) * shape.kv_bytes_per_token
    rate = moved / seen.spent.by(meter)
    return Row(
        "d",
        title,
        rate / seen.read_rate,
        bound,
        bound,
        by_wall=moved / seen.spent.wall / seen.read_rate,
        note=f"{rate / 1e9:.1f} of {seen.read_rate / 1e9:.1f} GB/s; "
        f"{len(seen.contexts)} sequences, {seen.mean_run:.1f} blocks in a row",
        detail={"tokens": sum(seen.contexts), "pool_use": seen.pool_use},
    )
