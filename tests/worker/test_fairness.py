"""Nobody starves: neither prefills beside decodes, nor decodes beside prefills, nor the queue."""

from __future__ import annotations

import random

import pytest
from depth import DEPTH
from enginerig import ROOT, Reference, Rig, greedy, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.paging import BlockPool
from worker.runner import StepPlan, StepResult
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, Phase, Sequence

B = 16


class Bare:
    """A scheduler whose plans are looked at and carried out at once; each step takes 10 ms."""

    def __init__(
        self, n_blocks: int = 40, budget: int = 64, max_running: int = 8, max_step_ms: float = 0.0
    ) -> None:
        self.scheduler = Scheduler(
            BlockPool(n_blocks, B),
            max_batch_tokens=budget,
            max_running=max_running,
            max_model_len=10_000,
            eos_token_ids=frozenset(),
            max_waiting=10_000,
            max_step_ms=max_step_ms,
        )
        self.rng = random.Random(1)
        self.names = 0

    def add(
        self, length: int, wanted: int, priority: int = 0, family: int | None = None
    ) -> Sequence:
        self.names += 1
        rng = self.rng if family is None else random.Random(family)
        tokens = list(prompt(rng, length))
        seq = Sequence(
            str(self.names), tokens, length, greedy(wanted), ROOT, 0.0, priority=priority
        )
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None, "there is always something to do"
        self.inspect(plan)
        tokens = {each.seq_id: self.rng.randrange(97, 123) for each in plan.chunks if each.sample}
        self.scheduler.commit(plan, StepResult(tokens, {}, 0.01))
        self.scheduler.check()
        return plan

    def inspect(self, plan: StepPlan) -> None:
        """Whoever is in a plan runs, once, and holds the blocks that the plan writes."""
        ids = [chunk.seq_id for chunk in plan.chunks]
        assert len(set(ids)) == len(ids)
        for chunk in plan.chunks:
            seq = self.scheduler.roster.known[chunk.seq_id]
            assert seq.phase is Phase.RUNNING, "it was preempted after it had been planned"
            assert tuple(seq.blocks[: len(chunk.blocks)]) == chunk.blocks
            assert chunk.start == seq.computed
            written = chunk.blocks[chunk.start // B :]
            assert all(self.scheduler.pool.refs(block) == 1 for block in written)


@settings(max_examples=40 * DEPTH, deadline=None)
@given(data=st.data(), budget=st.integers(1, 70), max_running=st.integers(1, 6))
def test_a_waiting_request_is_served_whatever_comes_later(data, budget, max_running) -> None:
    """Later arrivals of the same priority, as many as there is space for, for ever."""
    bare = Bare(budget=budget, max_running=max_running)
    lengths = st.integers(1, 300)
    for _ in range(data.draw(st.integers(0, 6))):
        bare.add(data.draw(lengths), data.draw(st.integers(1, 60)))
    ours = bare.add(data.draw(lengths), data.draw(st.integers(1, 40)))
    later = data.draw(st.lists(st.tuples(lengths, st.integers(1, 60)), min_size=1, max_size=8))
    work = sum(len(each.tokens) + each.params.max_tokens for each in bare.scheduler.roster.waiting)
    for turn in range(8 * work + 100):
        if ours.finish is not None:
            break
        length, wanted = later[turn % len(later)]
        bare.add(length, wanted, family=turn % 5)
        bare.step()
    assert ours.finish is FinishReason.LENGTH


@settings(max_examples=30 * DEPTH, deadline=None)
@given(
    budget=st.integers(1, 40),
    decodes=st.integers(1, 30),
    max_step_ms=st.sampled_from([0.0, 0.001, 25.0]),
    length=st.integers(2, 400),
)
def test_a_prefill_advances_beside_any_number_of_decodes(
    budget: int, decodes: int, max_step_ms: float, length: int
) -> None:
    bare = Bare(400, budget, max_running=decodes + 1, max_step_ms=max_step_ms)
    running = [bare.add(1, 5000) for _ in range(decodes)]
    while any(seq.output_len == 0 for seq in running):
        bare.step()
    late = bare.add(length, 1)
    rounds = -(-(decodes + 1) // budget) + 1
    for _ in range(length + 1):
        if late.finish is not None:
            break
        before = late.computed
        outputs = [seq.output_len for seq in running]
        for _ in range(2):
            if late.finish is None:
                bare.step()
        last = before == length - 1  # a single token takes its turn among the decodes
        assert late.finish is not None or late.computed > before or last
        for _ in range(2 * rounds):
            bare.step()
        assert all(seq.output_len > n for seq, n in zip(running, outputs, strict=True))
    assert late.finish is not None


@settings(max_examples=50 * DEPTH, deadline=None)
@given(data=st.data(), budget=st.integers(4, 70), n_blocks=st.integers(8, 40))
def test_plans_never_hold_what_was_preempted(data, budget, n_blocks) -> None:
    """Priorities, growth, aborts and shared prefixes in a small pool; ``inspect`` proves it."""
    bare = Bare(n_blocks, budget, max_running=data.draw(st.integers(1, 8)))
    made = []
    for _ in range(data.draw(st.integers(3, 12))):
        length = data.draw(st.integers(1, n_blocks * B - 2))
        priority = data.draw(st.integers(0, 3))
        made.append(
            bare.add(length, data.draw(st.integers(1, 80)), priority, data.draw(st.integers(0, 3)))
        )
        for _ in range(data.draw(st.integers(0, 4))):
            if not bare.scheduler.idle:
                bare.step()
        if data.draw(st.integers(0, 5)) == 0:
            bare.scheduler.abort(data.draw(st.sampled_from(made)).id)
    for _ in range(20_000):
        if bare.scheduler.idle:
            break
        bare.step()
    assert all(seq.finish is not None for seq in made)
    assert bare.scheduler.pool.available == n_blocks


# --- more urgent ones ----------------------------------------------------------------------------


def test_an_urgent_request_takes_the_blocks_of_less_urgent_ones() -> None:
    bare = Bare(n_blocks=40, budget=200)
    calm = [bare.add(9 * B, 2000, priority=5) for _ in range(3)]
    for _ in range(10):
        bare.step()
    urgent = bare.add(20 * B, 3)
    plan = bare.step()
    assert urgent.id in [chunk.seq_id for chunk in plan.chunks], "at once"
    assert [seq.phase for seq in calm] == [Phase.RUNNING, Phase.WAITING, Phase.WAITING]
    assert [seq.preemptions for seq in calm] == [0, 1, 1]
    for seq in calm:
        assert seq.output_len >= 8, "what was generated is kept"


def test_nobody_is_preempted_in_vain() -> None:
    """The more urgent one would not fit even then, because its equals hold too much."""
    bare = Bare(n_blocks=40, budget=200)
    equal = bare.add(25 * B, 2000)
    calm = bare.add(5 * B, 2000, priority=5)
    for _ in range(6):
        bare.step()
    waiting = bare.add(20 * B, 1)
    for _ in range(20):
        bare.step()
    assert (equal.preemptions, calm.preemptions) == (0, 0)
    assert waiting.phase is Phase.WAITING


def test_equals_do_not_preempt_each_other_to_start() -> None:
    bare = Bare(n_blocks=40, budget=200)
    first = bare.add(30 * B, 50, priority=5)
    bare.step()
    bare.add(30 * B, 1, priority=5)
    bare.add(3 * B, 1, priority=7)
    while first.finish is None:
        bare.step()
    assert first.preemptions == 0


def test_an_urgent_request_takes_a_place_when_all_are_taken() -> None:
    bare = Bare(max_running=2)
    calm = [bare.add(10, 500, priority=each) for each in (1, 2)]
    bare.step()
    urgent = bare.add(10, 3)
    bare.step()
    assert urgent.output_len == 1
    assert [seq.phase for seq in calm] == [Phase.RUNNING, Phase.WAITING]
    while calm[1].finish is None:
        bare.step()


def test_the_one_that_computes_an_urgent_ones_prefix_is_spared() -> None:
    bare = Bare(n_blocks=40, budget=40)
    shared = bare.add(20 * B, 5, priority=5, family=3)
    bare.step()
    urgent = bare.add(20 * B, 1, family=3)
    late = bare.add(5 * B, 1, priority=1)
    while urgent.finish is None:
        bare.step()
    assert shared.preemptions == 0
    assert late.finish is None or late.finish is FinishReason.LENGTH


@settings(max_examples=40 * DEPTH, deadline=None)
@given(data=st.data(), budget=st.integers(2, 80))
def test_the_most_urgent_is_never_kept_waiting_by_others(data, budget) -> None:
    """Whatever runs: after the next step it runs itself, or waits for a prefix that is computed, or
    has found the step's budget used up by its equals."""
    bare = Bare(n_blocks=40, budget=budget, max_running=data.draw(st.integers(1, 6)))
    for _ in range(data.draw(st.integers(1, 10))):
        bare.add(
            data.draw(st.integers(1, 500)),
            data.draw(st.integers(1, 100)),
            data.draw(st.integers(1, 3)),
            data.draw(st.integers(0, 3)),
        )
        bare.step()
    urgent = bare.add(data.draw(st.integers(1, 600)), 5, family=data.draw(st.integers(0, 6)))
    work = len(urgent.tokens) // max(1, budget // 8) + 8 * 500
    for _ in range(work):
        if urgent.finish is not None:
            break
        bare.step()
        assert urgent.phase is not Phase.WAITING or urgent.held_by is not None
    assert urgent.finish is FinishReason.LENGTH
    assert urgent.preemptions == 0


@pytest.mark.parametrize("budget", [5, 64])
def test_answers_are_the_same_with_priorities(budget: int) -> None:
    rng = random.Random(budget)
    reference = Reference()
    rig = Rig(n_blocks=30, budget=budget, max_running=5)
    families = [prompt(rng, 200) for _ in range(4)]
    asked = {}
    for _ in range(60):
        job = rng.choice(families)[: rng.randint(5, 200)], greedy(rng.randint(1, 60))
        asked[rig.submit(*job, priority=rng.randint(0, 4))] = job
        for _ in range(rng.randint(0, 5)):
            rig.loop.step()
            rig.scheduler.check()
    rig.run()
    assert rig.loop.stats.preemptions > 1
    for request_id, job in asked.items():
        assert rig.answers[request_id].outcome == reference.outcome(*job)
    rig.check_idle()
