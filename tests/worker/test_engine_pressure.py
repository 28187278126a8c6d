"""Too little memory, too long prompts, too many at once: everything ends, and ends right."""

from __future__ import annotations

import random

import pytest
from enginerig import Reference, Rig, greedy, prompt

from shared.errors import ContextLengthExceeded, NoCapacity
from worker.sequence import FinishReason, SamplingParams

B = 16


def test_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody() -> None:
    rng = random.Random(1)
    rig = Rig(n_blocks=64, budget=128)
    too_long = rig.submit(prompt(rng, 1500), greedy(4))
    exactly = rig.submit(prompt(rng, 64 * B), greedy(4))
    small = [rig.submit(prompt(rng, 40), greedy(4)) for _ in range(10)]
    rig.run()
    for request_id in (too_long, exactly):
        error = rig.answers[request_id].error
        assert isinstance(error, ContextLengthExceeded)
        assert error.status == 400
        assert error.code == "context_length_exceeded"
    assert all(rig.answers[each].finish is not None for each in small)
    rig.check_idle()


@pytest.mark.parametrize("neighbours", [0, 5])
def test_an_answer_that_outgrows_the_pool_ends_at_capacity(neighbours: int) -> None:
    rng = random.Random(2)
    rig = Rig(n_blocks=64, budget=128)
    tokens = prompt(rng, 1000)
    request_id = rig.submit(tokens, greedy(500, ignore_eos=True))
    others = [rig.submit(prompt(rng, 40), greedy(30)) for _ in range(neighbours)]
    rig.run()
    answer = rig.answers[request_id]
    assert answer.finish is FinishReason.LENGTH
    assert answer.last.output_tokens == len(answer.tokens) == 64 * B - 1000
    assert answer.text == str(Reference().outcome(tokens, greedy(500, ignore_eos=True))[0])[:24]
    assert all(rig.answers[each].finish is not None for each in others)
    rig.check_idle()


def test_the_models_length_ends_an_answer() -> None:
    rig = Rig(max_model_len=50)
    answer = rig.answer(prompt(random.Random(1), 47), greedy(500, ignore_eos=True))
    assert (answer.finish, len(answer.tokens)) == (FinishReason.LENGTH, 3)
    refused = rig.submit(prompt(random.Random(1), 50), greedy(1))
    rig.run()
    assert isinstance(rig.answers[refused].error, ContextLengthExceeded)


def test_a_full_queue_is_refused_with_503() -> None:
    rig = Rig(max_waiting=3)
    ids = [rig.submit(prompt(random.Random(each), 20), greedy(2)) for each in range(5)]
    rig.run()
    errors = [rig.answers[each].error for each in ids]
    assert errors[:3] == [None] * 3
    assert all(isinstance(error, NoCapacity) and error.retry_after_s for error in errors[3:])


def test_big_prompts_run_one_after_the_other_never_half_each() -> None:
    rng = random.Random(3)
    reference = Reference()
    rig = Rig(n_blocks=100, budget=64)
    big = [(prompt(rng, 60 * B), greedy(8)) for _ in range(4)]
    growing = [(prompt(rng, 30), greedy(300, ignore_eos=True)) for _ in range(12)]
    jobs = {rig.submit(*job): job for job in big}
    rig.step(5)
    assert (rig.scheduler.load().running, rig.scheduler.load().waiting) == (1, 3)
    jobs |= {rig.submit(*job): job for job in growing}
    rig.run()
    for request_id, job in jobs.items():
        assert rig.answers[request_id].outcome == reference.outcome(*job)
    rig.check_idle()


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize(
    "params",
    [
        greedy(120, ignore_eos=True, logprobs=2),
        greedy(120, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3),
        SamplingParams(max_tokens=120, temperature=0.9, seed=11, ignore_eos=True),
        greedy(120, ignore_eos=True, stop=("ee", "tat")),
        greedy(120, min_tokens=110),
    ],
    ids=["greedy", "penalties", "seeded", "stops", "min_tokens"],
)
def test_preempted_requests_continue_as_if_alone(params: SamplingParams, budget: int) -> None:
    rng = random.Random(4)
    reference = Reference()
    rig = Rig(n_blocks=110, block_size=4, budget=budget)
    jobs = {}
    for turn in range(24):
        job = prompt(rng, rng.randint(20, 60)), params
        jobs[rig.submit(*job)] = job
        if turn >= 12:
            rig.step(20)
    rig.run()
    if not params.stop:
        assert rig.loop.stats.preemptions > (20 if budget == 64 else 5)
        assert rig.loop.stats.prefill_recomputed_tokens > 0
    for request_id, job in jobs.items():
        answer = rig.answers[request_id]
        assert answer.outcome == reference.outcome(*job)
        assert answer.last.prompt_tokens == len(job[0])
        assert answer.last.cached_tokens == 0
        assert [delta.output_tokens for delta in answer.deltas] == [
            count + 1 for count in range(len(answer.deltas))
        ]
    rig.check_idle()


def test_the_victim_is_the_least_urgent_then_the_youngest() -> None:
    rng = random.Random(5)
    rig = Rig(n_blocks=20, budget=64)
    priorities = [0, 7, 0, 7, 0]
    ids = [
        rig.submit(prompt(rng, 30), greedy(200, ignore_eos=True), priority=each)
        for each in priorities
    ]
    first_victims: list[str] = []
    seqs = dict(rig.scheduler.roster.known)
    while rig.loop.step():
        first_victims += [
            each for each in ids if seqs[each].preemptions and each not in first_victims
        ]
    assert first_victims[:3] == [ids[3], ids[1], ids[4]]
    assert seqs[ids[0]].preemptions == 0
    rig.check_idle()


@pytest.mark.parametrize("budget", [1, 2, 3, 8])
def test_more_decodes_than_budget_starve_neither_decodes_nor_prefills(budget: int) -> None:
    rng = random.Random(6)
    reference = Reference()
    rig = Rig(n_blocks=100, budget=budget)
    jobs = {}
    for _ in range(10):
        job = prompt(rng, 5), greedy(100, ignore_eos=True)
        jobs[rig.submit(*job)] = job
    rig.step(60 if budget < 3 else 20)
    late = prompt(rng, 30), greedy(1)
    late_id = rig.submit(*late)
    jobs[late_id] = late
    decoded = rig.scheduler.counters.decode_tokens
    rig.step(20)
    assert rig.scheduler.counters.decode_tokens - decoded >= 8
    for _ in range(100):
        if rig.answers[late_id].finish is None:
            rig.step()
    assert rig.answers[late_id].finish is not None
    assert rig.scheduler.load().running == 10
    rig.run()
    for request_id, job in jobs.items():
        assert rig.answers[request_id].outcome == reference.outcome(*job)


def decoding(rig: Rig, count: int) -> list[str]:
    ids = [
        rig.submit(prompt(random.Random(each), 8), greedy(3000, ignore_eos=True))
        for each in range(count)
    ]
    rig.step(30)
    return ids


def gaps(rig: Rig, ids: list[str], until: str) -> tuple[float, int]:
    """Longest time and most steps between two tokens of a decoder until a request has ended."""
    longest, most = 0.0, 0
    seen = {each: (rig.now, 0, len(rig.answers[each].deltas)) for each in ids}
    step = 0
    while rig.answers[until].finish is None:
        rig.step()
        step += 1
        for each in ids:
            count = len(rig.answers[each].deltas)
            then, step_then, before = seen[each]
            if count > before:
                longest, most = max(longest, rig.now - then), max(most, step - step_then)
                seen[each] = (rig.now, step, count)
    return longest, most


def test_a_long_prefill_does_not_freeze_decodes() -> None:
    rig = Rig(n_blocks=2000, budget=64, prefill_s_per_token=0.001, decode_s_per_step=0.01)
    ids = decoding(rig, 4)
    rng = random.Random(7)
    rig.submit(prompt(rng, 60 * 64), greedy(1))
    for _ in range(3):
        last = rig.submit(prompt(rng, 60 * 60), greedy(1))
    longest, most = gaps(rig, ids, last)
    assert most == 1
    assert longest <= 0.064 + 0.01 + 1e-9


@pytest.mark.parametrize("max_step_ms", [30.0, 80.0, 250.0])
def test_the_time_budget_keeps_steps_beside_decodes_short(max_step_ms: float) -> None:
    rig = Rig(
        n_blocks=2000,
        budget=2048,
        max_step_ms=max_step_ms,
        prefill_s_per_token=0.001,
        decode_s_per_step=0.01,
    )
    ids = decoding(rig, 4)
    last = rig.submit(prompt(random.Random(8), 2048), greedy(1))
    started = rig.now
    longest, _ = gaps(rig, ids, last)
    assert longest <= 1.2 * max_step_ms / 1000
    # ... and the budget is used: nearly all the time that is not decode time goes to the prefill.
    steps = -(-2048 // (max_step_ms - 10.0))
    assert rig.now - started <= 1.2 * (2.048 + 0.01 * steps)


def test_without_decodes_the_whole_token_budget_is_used() -> None:
    rig = Rig(n_blocks=200, budget=512, max_step_ms=10.0, prefill_s_per_token=0.001)
    rig.answer(prompt(random.Random(1), 600), greedy(1))
    rig.submit(prompt(random.Random(2), 600), greedy(1))
    rig.step()
    assert [plan.n_tokens for plan in rig.runner.plans] == [512, 88, 512]


def test_a_prefill_gets_its_minimum_even_when_decodes_use_up_the_time() -> None:
    rig = Rig(
        n_blocks=400,
        budget=64,
        max_step_ms=5.0,
        prefill_s_per_token=0.001,
        decode_s_per_step=1.0,
    )
    decoding(rig, 2)
    rig.submit(prompt(random.Random(2), 160), greedy(1))
    rig.step()
    assert rig.runner.plans[-1].n_tokens == 2 + 16


def test_a_failed_step_ends_its_sequences_and_the_engine_goes_on() -> None:
    rng = random.Random(9)
    rig = Rig(budget=64)
    ids = [rig.submit(prompt(rng, 50), greedy(20)) for _ in range(3)]
    rig.step(2)
    rig.runner.fail_next = True
    rig.step()
    lost = [each for each in ids if rig.answers[each].finish is FinishReason.ERROR]
    assert lost
    assert all(rig.answers[each].last.error for each in lost)
    assert rig.loop.failed_steps == 1
    tokens = prompt(rng, 50)
    assert rig.answer(tokens, greedy(20)).outcome == Reference().outcome(tokens, greedy(20))
    assert rig.loop.failed_steps == 0
    rig.check_idle()
