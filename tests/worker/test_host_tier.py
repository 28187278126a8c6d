"""The engine with a second tier in host memory: what was evicted comes back, answers are equal."""

from __future__ import annotations

import random

import pytest
from enginerig import Reference, Rig, greedy, prompt, replay

from shared.types import Tier
from worker.hostpace import RETRY_STEPS, HostPace
from worker.runner import StepPlan
from worker.sequence import FinishReason, SamplingParams

B = 16


def conversations(rng: random.Random, count: int, blocks: int) -> list[tuple[int, ...]]:
    return [prompt(rng, blocks * B + 5) for _ in range(count)]


def test_a_second_visit_is_served_from_host_memory() -> None:
    rng = random.Random(1)
    reference = Reference()
    prompts = conversations(rng, 8, 9)
    rig = Rig(n_blocks=40, host_blocks=80)
    for tokens in prompts:
        assert rig.answer(tokens, greedy(4)).last.cached_tokens == 0
    before = rig.loop.stats
    for tokens in prompts:
        answer = rig.answer(tokens, greedy(4))
        assert answer.last.cached_tokens == 9 * B
        assert answer.outcome == reference.outcome(tokens, greedy(4))
    stats = rig.loop.stats
    assert stats.prefill_computed_tokens - before.prefill_computed_tokens == 8 * 5
    assert stats.host_tokens > 5 * 9 * B
    assert stats.host_blocks_moved_in * B == stats.host_tokens
    rig.check_idle()


def test_events_follow_a_block_from_tier_to_tier() -> None:
    rng = random.Random(2)
    first, second = conversations(rng, 2, 20)
    rig = Rig(n_blocks=25, host_blocks=40)
    rig.answer(first, greedy(1))
    rig.loop.publish()
    keys = replay(rig.events)
    assert len(keys) == 20
    rig.answer(second, greedy(1))
    rig.loop.publish()
    host = replay(rig.events, Tier.HOST)
    assert host
    assert host < keys
    assert replay(rig.events).isdisjoint(host)
    assert replay(rig.events) | host >= keys
    rig.answer(first, greedy(1))
    rig.loop.publish()
    assert replay(rig.events) >= keys
    assert replay(rig.events, Tier.HOST).isdisjoint(keys)
    rig.check_idle()


@pytest.mark.parametrize(("block_size", "n_blocks", "host_blocks"), [(16, 40, 30), (5, 130, 400)])
def test_storm_of_aborts_lost_steps_and_flushes(
    block_size: int, n_blocks: int, host_blocks: int
) -> None:
    rng = random.Random(block_size)
    reference = Reference()
    starts = [prompt(rng, rng.randint(2 * B, 12 * B)) for _ in range(20)]
    prompts = [(rng.choice(starts) + prompt(rng, rng.randint(1, 8 * B))) for _ in range(60)]
    settings = [
        greedy(1),
        greedy(12, logprobs=1),
        greedy(30, stop=("e ", "th")),
        SamplingParams(max_tokens=20, temperature=0.7, seed=5, presence_penalty=0.5),
    ]
    rig = Rig(n_blocks=n_blocks, block_size=block_size, budget=96, host_blocks=host_blocks)
    asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    open_ids: list[str] = []
    while len(asked) < 600 or open_ids:
        while len(open_ids) < 12 and len(asked) < 600:
            job = rng.choice(prompts), rng.choice(settings)
            open_ids.append(rig.submit(*job))
            asked[open_ids[-1]] = job
        rig.runner.fail_next = rng.random() < 0.01
        rig.loop.step()
        if rng.random() < 0.03:
            rig.loop.abort(rng.choice(open_ids))
        if rng.random() < 0.003:
            rig.pool.clear()
        if rng.random() < 0.02:
            rig.scheduler.check()
        open_ids = [each for each in open_ids if rig.answers[each].finish is None]
    ended = [each for each in asked if rig.answers[each].finish in ("stop", "length")]
    assert len(ended) > 350
    for request_id in ended:
        assert rig.answers[request_id].outcome == reference.outcome(*asked[request_id])
    assert rig.loop.stats.host_tokens > 500
    assert rig.loop.stats.preemptions > 0
    rig.check_idle()


def test_a_preempted_sequence_comes_back_from_host_memory() -> None:
    rng = random.Random(4)
    reference = Reference()
    jobs = [(prompt(rng, 5 * B), greedy(80, ignore_eos=True)) for _ in range(6)]
    recomputed = []
    for host_blocks in (0, 60):
        rig = Rig(n_blocks=34, budget=128, host_blocks=host_blocks)
        ids = [rig.submit(*job) for job in jobs]
        rig.run()
        for request_id, job in zip(ids, jobs, strict=True):
            assert rig.answers[request_id].outcome == reference.outcome(*job)
        assert rig.loop.stats.preemptions > 0
        recomputed.append(rig.loop.stats.prefill_recomputed_tokens)
        rig.check_idle()
    assert recomputed[1] < recomputed[0] / 2


def test_an_abort_between_plan_and_run_leaves_what_was_being_loaded_whole() -> None:
    rng = random.Random(5)
    reference = Reference()
    first, second = conversations(rng, 2, 20)
    rig = Rig(n_blocks=25, budget=512, host_blocks=40)
    rig.answer(first, greedy(1))
    rig.answer(second, greedy(1))
    request_id = rig.submit(first, greedy(4))
    plan = rig.scheduler.plan()
    assert plan is not None
    assert {copy.source for copy in plan.copies} == {Tier.GPU, Tier.HOST}
    rig.loop.abort(request_id)
    rig.scheduler.check()
    rig.scheduler.commit(plan, rig.runner.run(plan))
    for tokens in (first, second):
        answer = rig.answer(tokens, greedy(4))
        assert answer.last.cached_tokens == 20 * B
        assert answer.outcome == reference.outcome(tokens, greedy(4))
    rig.check_idle()


def test_a_lost_step_leaves_nothing_behind_that_it_was_to_load() -> None:
    rng = random.Random(6)
    reference = Reference()
    first, second = conversations(rng, 2, 20)
    rig = Rig(n_blocks=25, budget=512, host_blocks=40)
    rig.answer(first, greedy(1))
    rig.answer(second, greedy(1))
    rig.runner.fail_next = True
    assert rig.answer(first, greedy(4)).finish is FinishReason.ERROR
    for tokens in (first, second):
        answer = rig.answer(tokens, greedy(4))
        assert answer.outcome == reference.outcome(tokens, greedy(4))
        assert answer.last.cached_tokens == 0
    rig.check_idle()


def test_who_shares_what_a_lost_step_was_to_load_starts_again() -> None:
    rng = random.Random(8)
    reference = Reference()
    first, second = conversations(rng, 2, 20)
    rig = Rig(n_blocks=28, budget=512, host_blocks=40)
    rig.answer(first, greedy(1))
    rig.answer(second, greedy(1))
    lost, sharing = (rig.submit(first, greedy(4)) for _ in range(2))
    plan = rig.scheduler.plan()
    assert plan is not None
    assert [chunk.seq_id for chunk in plan.chunks] == [lost, sharing]
    # As if the budget had ended before the second one's chunk.
    ends = rig.scheduler.fail(StepPlan(plan.chunks[:1], plan.copies))
    assert [out.seq.id for out in ends] == [lost]
    rig.scheduler.check()
    rig.run()
    assert rig.answers[sharing].outcome == reference.outcome(first, greedy(4))
    assert rig.loop.stats.preemptions == 1


@pytest.mark.parametrize(("copy_s", "used"), [(0.001, True), (0.1, False)])
def test_the_tier_is_used_only_where_loading_is_quicker_than_computing(
    copy_s: float, used: bool
) -> None:
    rng = random.Random(7)
    prompts = conversations(rng, 8, 9)
    rig = Rig(n_blocks=40, host_blocks=80, prefill_s_per_token=0.001, copy_s_per_block=copy_s)
    for _ in range(3):
        for tokens in prompts:
            rig.answer(tokens, greedy(1))
    moved_in = rig.loop.stats.host_blocks_moved_in
    assert (moved_in > 100) is used
    load = rig.scheduler.load()
    assert load.host_tokens_per_s == pytest.approx(B / copy_s)
    assert load.prefill_tokens_per_s == pytest.approx(1000), "copies do not slow the known pace"
    rig.check_idle()


def test_a_closed_tier_gets_another_chance() -> None:
    pace = HostPace()
    assert pace.pays(0.5), "nothing is measured yet"
    pace.observe(10, 10.0, 5, 0)
    assert pace.pays(0.0), "the pace of computing is not known yet"
    assert not any(pace.pays(0.5) for _ in range(RETRY_STEPS - 1))
    assert pace.pays(0.5)
    pace.observe(10, 1.0, 5, 0)
    assert pace.pays(0.5)
    assert pace.blocks_per_s == pytest.approx(10)


def test_what_is_copied_out_in_vain_counts_against_the_tier() -> None:
    pace = HostPace()
    pace.observe(100, 10.0, 40, 0)
    assert pace.s_per_load == pytest.approx(0.2)
    assert pace.pays(0.25)
    pace.observe(1000, 100.0, 100, 900)
    assert pace.s_per_load > 0.5
    assert not pace.pays(0.25)
    pace.observe(0, 0.0, 40_000, 0)
    assert pace.pays(0.25)
