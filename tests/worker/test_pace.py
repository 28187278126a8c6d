"""The time budget of steps with decoding neighbours: pure scheduler, simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from depth import DEPTH
from enginerig import ROOT, greedy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shared.paging import BlockPool
from worker.pace import MIN_CHUNK, Allowance, Pace
from worker.runner import Chunk, StepPlan, StepResult
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.steptime import StepTime, Work


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
            if seconds > 1.2e-3 * self.max_step_ms and work.tokens > MIN_CHUNK
        ]


def traffic(simulation: Simulation) -> Callable[[], Sequence]:
    """Short and very long prompts, some with most of it in the cache, so that contexts jump."""
    rng = simulation.rng

    def next_request() -> Sequence:
        length = rng.choice([30, 200, 1000, 3000, 8000])
        family = rng.choice([None, None, 1, 2])
        return simulation.add(length, rng.choice([5, 50, 200]), family)

    return next_request


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("max_step_ms", [60.0, 250.0])
def test_mixed_steps_keep_their_time(name: str, max_step_ms: float) -> None:
    simulation = Simulation(MACHINES[name], max_step_ms, seed=1)
    simulation.run(3000, traffic(simulation), at_most=12)
    assert len(simulation.mixed) > 500
    assert len(simulation.too_long()) <= 0.01 * len(simulation.mixed)


@settings(max_examples=8 * DEPTH, deadline=None, phases=[Phase.generate])
@given(
    st.builds(
        Machine,
        fixed=st.floats(0.001, 0.05),
        per_decode=st.floats(0.0, 0.01),
        per_decode_context=st.floats(0, 4e-6),
        per_token=st.floats(2e-5, 0.004),
        per_context=st.floats(0.0, 3e-6),
        pad_to=st.integers(1, 64),
        noise=st.floats(0.0, 0.06),
        spikes=st.floats(0.0, 0.001),
    ),
    st.floats(40.0, 1000.0),
    st.integers(1, 10_000),
)
def test_whatever_the_machine(machine: Machine, max_step_ms: float, seed: int) -> None:
    simulation = Simulation(machine, max_step_ms, seed)
    simulation.run(1000, traffic(simulation), at_most=10)
    mixed = len(simulation.mixed)
    assert len(simulation.too_long()) <= max(2, 0.01 * mixed)


@pytest.mark.parametrize("name", MACHINES)
def test_the_time_is_used(name: str) -> None:
    """In the steps that could hold more, at least 80 % of the time budget."""
    simulation = Simulation(MACHINES[name], 250.0, seed=2, budget=16_000)
    simulation.run(200, traffic(simulation), at_most=8)
    for _ in range(3):
        simulation.add(400, 2000)
    while simulation.scheduler.load().queued_prefill_tokens:
        simulation.step()
    simulation.mixed.clear()
    simulation.add(15_000, 1)
    while simulation.scheduler.load().queued_prefill_tokens:
        simulation.step()
    used = [seconds for work, seconds in simulation.mixed[:-1] if work.tokens > MIN_CHUNK]
    assert used
    assert sum(used) / len(used) > 0.8 * 0.25


def test_a_machine_that_becomes_slower_and_faster_again() -> None:
    simulation = Simulation(CPU_135M, 250.0, seed=3)
    next_request = traffic(simulation)
    simulation.run(600, next_request, at_most=10)
    for factor in (2.0, 0.5):
        m = simulation.machine
        simulation.machine = replace(
            m,
            fixed=m.fixed * factor,
            per_decode=m.per_decode * factor,
            per_decode_context=m.per_decode_context * factor,
            per_token=m.per_token * factor,
            per_context=m.per_context * factor,
        )
        simulation.mixed.clear()
        simulation.run(1000, next_request, at_most=10)
        assert len(simulation.too_long(warm_up=40)) <= 0.01 * len(simulation.mixed)


def test_the_first_steps_are_careful() -> None:
    """Nothing is known but one tiny prompt: the chunks beside its decodes begin small."""
    simulation = Simulation(CPU_135M, 250.0, seed=4)
    simulation.add(5, 500)
    simulation.step()
    simulation.add(5000, 1)
    for _ in range(60):
        simulation.step()
    assert simulation.mixed[0][0].tokens <= MIN_CHUNK
    assert simulation.too_long(warm_up=0) == []


@pytest.mark.parametrize("max_step_ms", [0.001, 250.0])
@pytest.mark.parametrize("decodes", [1, 30])
def test_a_prefill_always_advances(max_step_ms: float, decodes: int) -> None:
    simulation = Simulation(CPU_135M, max_step_ms, seed=5)
    for _ in range(decodes):
        simulation.add(10, 5000)
    simulation.step()
    late = simulation.add(2000, 1)
    for _ in range(-(-2000 // MIN_CHUNK)):
        before = late.computed
        simulation.step()
        if late.finish is not None:
            break
        assert late.computed >= before + min(MIN_CHUNK, 2000 - before)
    assert late.finish is not None


def test_no_time_budget_no_limit() -> None:
    simulation = Simulation(CPU_135M, 0.0, seed=6)
    simulation.add(10, 5000)
    simulation.step()
    simulation.add(5000, 1)
    simulation.step()
    assert simulation.mixed[0][0].tokens == 511


# --- the parts -----------------------------------------------------------------------------------


@given(
    tokens=st.integers(0, 600),
    seconds=st.floats(-1.0, 2.0),
    per_token=st.floats(0.0, 0.01),
    per_attended=st.floats(0.0, 1e-5),
    asked=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 3000)), max_size=6),
)
def test_an_allowance_is_kept(tokens, seconds, per_token, per_attended, asked) -> None:
    allowance = Allowance(tokens, seconds, (per_token, per_attended))
    spent, taken = 0.0, 0
    for turn, (start, wanted) in enumerate(asked):
        if allowance.tokens < 1:
            break
        n = allowance.take(start, wanted)
        assert 0 <= n <= min(wanted, tokens - taken)
        if turn == 0:
            assert n >= min(wanted, tokens, MIN_CHUNK)
        taken += n
        spent += n * (per_token + per_attended * start) + n * n / 2 * per_attended
        assert n == 0 or (turn == 0 and n <= MIN_CHUNK) or spent <= seconds * 1.0001 + 1e-9
    assert allowance.tokens <= tokens - taken


def step_of(prefill: int, decodes: int) -> StepPlan:
    params = greedy(1)
    chunks = [Chunk("p", 0, (1,) * prefill, (0,), sample=True, params=params)] if prefill else []
    chunks += [
        Chunk(f"d{each}", 5, (1,), (0,), sample=True, params=params, output_len=1)
        for each in range(decodes)
    ]
    return StepPlan(tuple(chunks))


def test_the_rates_that_are_reported() -> None:
    pace = Pace(max_step_s=0.25)
    for _ in range(40):
        pace.observe(step_of(0, 4), 0.05)
        pace.observe(step_of(100, 4), 0.05 + 100 * 0.002)
        pace.observe(step_of(200, 0), 0.02 + 200 * 0.002)
    assert pace.decode_tokens_per_s == pytest.approx(20.0)
    assert pace.prefill_tokens_per_s == pytest.approx(500.0, rel=0.1)


def test_costs_are_found() -> None:
    rng = random.Random(1)
    model, machine = StepTime(), Machine(noise=0.0, pad_to=0)
    assert model.predict(Work(3, 100, 50, 100)) == 0.0
    for _ in range(300):
        work = Work(rng.randint(0, 30), rng.randint(0, 30_000), rng.choice([0, 0, 9, 50, 500]))
        work = replace(work, context=work.tokens * rng.randint(0, 8000))
        if work != Work():
            model.observe(work, machine.seconds(work, rng))
    for work in (Work(0, 0, 512, 512 * 256), Work(16, 16_000), Work(8, 8000, 100, 800_000)):
        assert model.predict(work) == pytest.approx(machine.exact(work), rel=0.05)


def test_decodes_do_not_wipe_out_what_is_known_about_prefills() -> None:
    rng = random.Random(2)
    model = StepTime()
    for n in (512, 300, 100, 512, 16, 200) * 5:
        work = Work(0, 0, n, n * 1000)
        model.observe(work, CPU_135M.seconds(work, rng))
    for _ in range(5000):
        work = Work(8, 4000)
        model.observe(work, CPU_135M.seconds(work, rng))
    work = Work(8, 4000, 400, 400_000)
    assert model.predict(work) == pytest.approx(CPU_135M.exact(work), rel=0.1)


def test_prompts_shorter_than_a_chunk() -> None:
    simulation = Simulation(CPU_135M, 80.0, seed=7)
    for _ in range(8):
        simulation.add(20, 3000)
    simulation.run(1000, lambda: simulation.add(simulation.rng.randint(1, 40), 1), at_most=30)
    assert len(simulation.mixed) > 200
    assert len(simulation.too_long()) <= 0.01 * len(simulation.mixed)
