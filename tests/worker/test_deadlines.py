"""A request past its deadline ends wherever it is, and gives everything back at once."""

from __future__ import annotations

import random

import pytest
from enginerig import Reference, Rig, greedy, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.deadlines import Deadlines
from worker.sequence import FinishReason, Sequence

B = 16
LONG = greedy(400, ignore_eos=True)


def timed(**settings: object) -> Rig:
    """A step with prefill takes a millisecond a token, one that decodes 10 ms more."""
    return Rig(prefill_s_per_token=0.001, decode_s_per_step=0.01, **settings)  # type: ignore[arg-type]


def test_queued_behind_a_big_one() -> None:
    rig = timed(max_running=1)
    rig.submit(prompt(random.Random(1), 300), greedy(1))
    late = rig.submit(prompt(random.Random(2), 50), greedy(5), deadline=0.2)
    rig.step(3)
    assert rig.answers[late].finish is None
    rig.step(2)
    assert rig.answers[late].finish is FinishReason.DEADLINE
    assert rig.answers[late].tokens == []
    rig.run()
    rig.check_idle()


def test_held_back_for_a_sibling() -> None:
    rig = timed()
    shared = prompt(random.Random(1), 300)
    first = rig.submit(shared, greedy(4))
    late = rig.submit(shared, greedy(4), deadline=0.3)
    rig.step(6)  # the fifth has space for both, and the second needs what the first computes
    assert rig.scheduler.counters.held_back == 1
    assert rig.answers[late].finish is FinishReason.DEADLINE
    rig.run()
    assert rig.answers[first].outcome == Reference().outcome(shared, greedy(4))
    rig.check_idle()


def test_the_sibling_that_is_waited_for_runs_out_of_time() -> None:
    rig = timed()
    shared = prompt(random.Random(1), 300)
    first = rig.submit(shared, greedy(4), deadline=0.1)
    second = rig.submit(shared, greedy(4))
    rig.run()
    assert rig.answers[first].finish is FinishReason.DEADLINE
    assert rig.answers[second].outcome == Reference().outcome(shared, greedy(4))
    assert rig.answers[second].last.cached_tokens == 128, "what had been computed is used"
    rig.check_idle()


@pytest.mark.parametrize("deadline", [0.1, 0.25, 0.4, 1.0])
def test_in_the_middle_of_prefill_or_decode(deadline: float) -> None:
    """310 ms of prefill, then decodes."""
    rig = timed()
    late = rig.submit(prompt(random.Random(1), 300), LONG, deadline=deadline)
    while rig.answers[late].finish is None:
        before = rig.now
        rig.loop.step()
    answer = rig.answers[late]
    assert answer.finish is FinishReason.DEADLINE
    assert before >= deadline, "not too early"
    assert before - deadline < 0.075, "and not later than the step that ran"
    assert (len(answer.tokens) > 0) == (deadline > 0.3)
    assert answer.last.output_tokens == len(answer.tokens)
    rig.check_idle()


def test_its_blocks_serve_another_in_the_same_step() -> None:
    rig = timed()
    rig.submit(prompt(random.Random(1), 38 * B), LONG, deadline=0.3)
    waiting = rig.submit(prompt(random.Random(2), 30 * B), greedy(1))
    while rig.scheduler.counters.deadlines == 0:
        rig.step()
    assert [chunk.seq_id for chunk in rig.runner.plans[-1].chunks] == [waiting]
    rig.run()
    rig.check_idle()


def test_an_answer_that_is_complete_in_time_is_not_touched() -> None:
    rig = timed()
    tokens = prompt(random.Random(1), 50)
    done = rig.submit(tokens, greedy(3), deadline=100.0)
    rig.run()
    rig.now = 101.0
    assert not rig.loop.step()
    assert rig.answers[done].outcome == Reference().outcome(tokens, greedy(3))
    assert rig.loop.stats.deadlines == 0
    rig.check_idle()


def test_preempted_ones_keep_their_deadline() -> None:
    rig = timed(n_blocks=20)
    ids = [rig.submit(prompt(random.Random(each), 60), LONG, deadline=1.5) for each in range(6)]
    while rig.loop.step():
        rig.scheduler.check()
    assert rig.loop.stats.preemptions > 0
    ends = [rig.answers[each].finish for each in ids]
    assert FinishReason.DEADLINE in ends
    assert set(ends) <= {FinishReason.DEADLINE, FinishReason.LENGTH}
    assert rig.loop.stats.deadlines == ends.count(FinishReason.DEADLINE)
    rig.check_idle()


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(
            st.integers(1, 200), st.integers(1, 40), st.none() | st.floats(0, 3), st.integers(0, 3)
        ),
        min_size=1,
        max_size=12,
    ),
    budget=st.integers(1, 80),
    aborted=st.sets(st.integers(0, 11)),
)
def test_whoever_is_late_ends_at_the_next_step_and_nobody_else(jobs, budget, aborted) -> None:
    rig = timed(n_blocks=24, budget=budget)
    ids = {}
    for length, wanted, deadline, family in jobs:
        tokens = prompt(random.Random(family), 200)[:length]
        ids[rig.submit(tokens, greedy(wanted), deadline=deadline)] = deadline
    while True:
        started = rig.now
        if not rig.loop.step():
            break
        rig.scheduler.check()
        for request_id, deadline in ids.items():
            finish = rig.answers[request_id].finish
            late = deadline is not None and deadline <= started
            assert finish is not None or not late
            assert finish is not FinishReason.DEADLINE or late
        for each in aborted:
            if rig.now > each / 4:
                rig.loop.abort(str(each))
    rig.check_idle()


def seq(name: str, deadline: float | None) -> Sequence:
    return Sequence(name, [1], 1, greedy(1), b"r" * 16, 0.0, deadline=deadline)


def test_deadlines_at_the_same_moment() -> None:
    deadlines = Deadlines()
    made = [seq(name, when) for name, when in (("b", 2.0), ("a", 2.0), ("c", None), ("d", 1.0))]
    for each in made:
        deadlines.add(each)
    assert deadlines.due(0.9) == []
    assert deadlines.due(1.0) == ["d"]
    assert deadlines.due(2.0) == ["d", "a", "b"]
    deadlines.discard(made[1])
    deadlines.discard(made[2])
    assert deadlines.due(9.0) == ["d", "b"]
    assert len(deadlines) == 2
