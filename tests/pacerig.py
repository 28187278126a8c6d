"""A scheduler with a time budget on machines that exist only here, and their time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import exp

import msgspec
from enginerig import ROOT, greedy

from shared.paging import BlockPool
from worker.pace import LEAST, MIN_CHUNK
from worker.runner import StepResult
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.steptime import Work


@dataclass(frozen=True)
class Machine:
    """How long steps really take, in seconds."""

    fixed: float = 0.02
    per_decode: float = 0.008
    per_decode_context: float = 2e-6
    per_token: float = 0.0018
    per_context: float = 8e-7
    pad_to: int = 8
    """A matrix with fewer rows takes as long as one with so many."""
    noise: float = 0.03
    spikes: float = 0.0
    """Share of steps that take three times as long."""

    def seconds(self, work: Work, rng: random.Random) -> float:
        exact = self.exact(work)
        if rng.random() < self.spikes:
            exact *= 3
        return exact * rng.lognormvariate(0, self.noise)

    def exact(self, work: Work) -> float:
        return (
            self.fixed
            + self.per_decode * work.decodes
            + self.per_decode_context * work.decode_context
            + self.per_token * (max(work.tokens, self.pad_to) if work.tokens else 0)
            + self.per_context * work.context
        )


def scaled(machine: Machine, factor: float) -> Machine:
    """All of it so many times as slow."""
    return replace(
        machine,
        fixed=machine.fixed * factor,
        per_decode=machine.per_decode * factor,
        per_decode_context=machine.per_decode_context * factor,
        per_token=machine.per_token * factor,
        per_context=machine.per_context * factor,
    )


CPU_135M = Machine()
GPU = Machine(0.012, 5e-5, 1e-9, 2.5e-5, 1e-9, 64, 0.05)
LONG_CONTEXTS = Machine(per_context=4e-6, noise=0.05)
SMALL_CHUNKS_ARE_DEAR = Machine(per_token=0.0008, pad_to=48, noise=0.04)
MACHINES = {
    "cpu": CPU_135M,
    "gpu": GPU,
    "long contexts": LONG_CONTEXTS,
    "small chunks": SMALL_CHUNKS_ARE_DEAR,
}


@dataclass
class Simulation:
    """A scheduler, and time that passes only here."""

    machine: Machine
    max_step_ms: float
    seed: int
    budget: int = 512
    mixed: list[tuple[Work, float]] = field(default_factory=list)
    """Steps with both, and how long they took."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.scheduler = Scheduler(
            BlockPool(6000, 16),
            max_batch_tokens=self.budget,
            max_running=40,
            max_model_len=16_000,
            eos_token_ids=frozenset(),
            max_waiting=1000,
            max_step_ms=self.max_step_ms,
        )
        self.names = 0

    def add(self, length: int, wanted: int, family: int | None = None) -> Sequence:
        shared = random.Random(f"family {family}").choices(range(99), k=length // 16 * 12)
        own = self.rng.choices(range(99), k=length)
        tokens = (shared + own)[:length] if family is not None else own
        self.names += 1
        seq = Sequence(str(self.names), tokens, length, greedy(wanted), ROOT, 0.0)
        self.scheduler.add(seq)
        return seq

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            return False
        work = Work.of(plan.chunks)
        seconds = self.machine.seconds(work, self.rng)
        if work.decodes and work.tokens:
            self.mixed.append((work, seconds))
        tokens = {each.seq_id: self.rng.randrange(99) for each in plan.chunks if each.sample}
        self.scheduler.commit(plan, StepResult(tokens, {}, seconds))
        return True

    def run(self, steps: int, next_request: Callable[[], Sequence], at_most: int) -> None:
        for _ in range(steps):
            load = self.scheduler.load()
            if load.running + load.waiting < at_most and self.rng.random() < 0.3:
                next_request()
            self.step()

    def too_long(self, warm_up: int = 20) -> list[tuple[Work, float]]:
        """Mixed steps beyond 1.2 x the budget, but for those where decodes and the smallest chunk
        leave no choice."""
        return [
            (work, seconds)
            for work, seconds in self.mixed[warm_up:]
            if seconds > 1.2e-3 * self.max_step_ms and work.tokens > self.no_choice(work)
        ]

    def no_choice(self, work: Work) -> int:
        """Tokens that a step gets whatever they take: more if not even a few fit."""
        few = msgspec.structs.replace(
            work, tokens=LEAST, context=work.context * LEAST // work.tokens
        )
        return MIN_CHUNK if self.machine.exact(few) > 1e-3 * self.max_step_ms else LEAST


def traffic(simulation: Simulation) -> Callable[[], Sequence]:
    """Short and very long prompts, some with most of it in the cache, so that contexts jump."""
    rng = simulation.rng

    def next_request() -> Sequence:
        length = rng.choice([30, 200, 1000, 3000, 8000])
        family = rng.choice([None, None, 1, 2])
        return simulation.add(length, rng.choice([5, 50, 200]), family)

    return next_request


@dataclass
class Weather:
    """A machine that others use too: for a second or two everything takes longer."""

    sway: float = 0.1
    level: float = 0.0

    def factor(self, rng: random.Random) -> float:
        self.level = 0.93 * self.level + rng.gauss(0.0, self.sway * (1 - 0.93**2) ** 0.5)
        return exp(max(0.0, self.level))
