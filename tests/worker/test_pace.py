"""The time budget of steps with decoding neighbours: pure scheduler, simulated time."""

from __future__ import annotations

import random

import msgspec
import pytest
from depth import DEPTH
from enginerig import greedy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pacerig import CPU_135M, MACHINES, Machine, Simulation, Weather, scaled, traffic

from worker.pace import LEAST, MIN_CHUNK, Allowance, Pace
from worker.runner import Chunk, StepPlan
from worker.steptime import StepTime, Work


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
        simulation.machine = scaled(simulation.machine, factor)
        simulation.mixed.clear()
        simulation.run(1000, next_request, at_most=10)
        assert len(simulation.too_long(warm_up=40)) <= 0.01 * len(simulation.mixed)


@pytest.mark.parametrize(
    ("sway", "noise", "excused"),
    [(0.0, 0.03, 0.0), (0.1, 0.03, 0.005), (0.2, 0.03, 0.02), (0.0, 0.1, 0.004)],
)
@pytest.mark.parametrize("max_step_ms", [100.0, 250.0])
def test_neighbours_wait_no_longer_on_a_machine_that_others_use(
    sway: float, noise: float, excused: float, max_step_ms: float
) -> None:
    """As `bench/engine.py --only e`: four decodes and prompts of 2,048 tokens, where 16 tokens of
    a prompt may already take too long. All mixed steps count, the smallest ones too."""
    machine = Machine(0.006, 0.005, 1.5e-6, 0.0036, 1e-6, pad_to=1, noise=noise)
    long, steps = 0, 0
    for seed in range(4):
        simulation, weather = Simulation(machine, max_step_ms, seed, budget=2048), Weather(sway)
        for _ in range(4):
            simulation.add(512, 8000)
        while simulation.scheduler.load().queued_prefill_tokens:
            simulation.step()
        simulation.mixed.clear()
        for _ in range(3):
            simulation.add(2048, 1)
            while simulation.scheduler.load().queued_prefill_tokens:
                factor = weather.factor(simulation.rng)
                simulation.machine = scaled(machine, factor)
                simulation.step()
        taken = [seconds for _, seconds in simulation.mixed[20:]]
        long += sum(seconds > 1.2e-3 * max_step_ms for seconds in taken)
        steps += len(taken)
    assert steps > 400
    assert long <= excused * steps


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


@pytest.mark.parametrize(
    ("max_step_ms", "decodes", "least"),
    [(0.001, 1, MIN_CHUNK), (0.001, 30, MIN_CHUNK), (250.0, 1, MIN_CHUNK), (250.0, 30, LEAST)],
)
def test_a_prefill_always_advances(max_step_ms: float, decodes: int, least: int) -> None:
    """With 30 decodes, which take all of the time or a little less, by LEAST at least."""
    simulation = Simulation(CPU_135M, max_step_ms, seed=5)
    for _ in range(decodes):
        simulation.add(10, 5000)
    simulation.step()
    late = simulation.add(2000, 1)
    for _ in range(-(-2000 // least)):
        before = late.computed
        simulation.step()
        if late.finish is not None:
            break
        assert late.computed >= before + min(least, 2000 - before)
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
    least = LEAST if seconds > 0.0 else MIN_CHUNK
    for turn, (start, wanted) in enumerate(asked):
        if allowance.tokens < 1:
            break
        n = allowance.take(start, wanted)
        assert 0 <= n <= min(wanted, tokens - taken)
        if turn == 0:
            assert n >= min(wanted, tokens, least)
        taken += n
        spent += n * (per_token + per_attended * start) + n * n / 2 * per_attended
        assert n == 0 or (turn == 0 and n <= least) or spent <= seconds * 1.0001 + 1e-9
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
        work = msgspec.structs.replace(work, context=work.tokens * rng.randint(0, 8000))
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
