"""Many requests, little memory: equal answers, no block lost. (Small pool, queueing, aborts.)"""

from __future__ import annotations

import random

import pytest
from enginerig import Reference, Rig, greedy, prompt

from worker.sequence import FinishReason, SamplingParams

B = 16


def families(rng: random.Random, count: int, low: int, high: int) -> list[tuple[int, ...]]:
    """Prompts of ``low .. high`` blocks, half of them branching off from another one."""
    made = [prompt(rng, rng.randint(low * B, high * B))]
    while len(made) < count:
        start = rng.choice(made)[: rng.randint(0, high * B)] if rng.random() < 0.5 else ()
        length = rng.randint(low * B, high * B)
        made.append((start + prompt(rng, length))[:length])
    return made


@pytest.mark.parametrize(("block_size", "n_blocks"), [(16, 40), (5, 130)])
def test_storm_on_a_pool_of_forty_blocks(block_size: int, n_blocks: int) -> None:
    rng = random.Random(block_size)
    reference = Reference()
    prompts = families(rng, 200, 3, 20)
    settings = [
        greedy(1),
        greedy(12, logprobs=1),
        greedy(30, stop=("e ", "th")),
        SamplingParams(max_tokens=20, temperature=0.7, seed=5, presence_penalty=0.5),
    ]
    rig = Rig(n_blocks=n_blocks, block_size=block_size, budget=96)
    asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    open_ids: list[str] = []
    n_requests = 5000 if block_size == 16 else 1000
    while len(asked) < n_requests or open_ids:
        while len(open_ids) < 24 and len(asked) < n_requests:
            job = rng.choice(prompts), rng.choice(settings)
            open_ids.append(rig.submit(*job))
            asked[open_ids[-1]] = job
        assert rig.loop.step()
        if rng.random() < 0.02:
            rig.scheduler.check()
        open_ids = [each for each in open_ids if rig.answers[each].finish is None]
    for request_id, job in asked.items():
        assert rig.answers[request_id].outcome == reference.outcome(*job)
        assert rig.answers[request_id].last.cached_tokens < len(job[0])
    assert rig.loop.stats.prefill_cached_tokens > 0
    rig.check_idle()


def test_aborts_at_any_moment_give_everything_back() -> None:
    rng = random.Random(2)
    reference = Reference()
    rig = Rig(budget=40)
    prompts = families(rng, 40, 1, 12)
    asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    doomed: list[tuple[int, str]] = []
    for moment in range(100_000):
        while len(doomed) < 30 and len(asked) < 3000:
            job = rng.choice(prompts), greedy(rng.choice([1, 3, 25]))
            request_id = rig.submit(*job)
            asked[request_id] = job
            delay = rng.choice([0, 1, 2, 3, 5, 10, 30, 60])
            doomed.append((moment + delay, request_id))
            if rng.random() < 0.1:
                doomed.append((moment + delay + 1, request_id))  # twice
        due = [request_id for when, request_id in doomed if when <= moment]
        doomed = [(when, request_id) for when, request_id in doomed if when > moment]
        for request_id in due:
            rig.loop.abort(request_id)
            rig.scheduler.check()
        rig.loop.step()
        if not doomed and len(asked) == 3000:
            break
    rig.run()
    rig.check_idle()
    ends = [rig.answers[request_id].finish for request_id in asked]
    assert min(ends.count(FinishReason.ABORT), ends.count(FinishReason.LENGTH)) > 300
    for request_id, job in asked.items():
        answer = rig.answers[request_id]
        if answer.finish is not FinishReason.ABORT:
            assert answer.outcome == reference.outcome(*job)
    whole_pool = prompt(rng, 40 * B - 1)
    request_id = rig.submit(whole_pool, greedy(4))
    rig.step(1 + len(whole_pool) // 40)
    assert rig.answers[request_id].finish is FinishReason.LENGTH


def test_an_abort_between_plan_and_commit_frees_at_once_and_spoils_nothing() -> None:
    rng = random.Random(3)
    reference = Reference()
    rig = Rig(budget=64)
    prompts = families(rng, 12, 2, 8)
    asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    for _ in range(400):
        if len(asked) < 200:
            job = rng.choice(prompts), greedy(10)
            asked[rig.submit(*job)] = job
        plan = rig.scheduler.plan()
        if plan is None:
            break
        result = rig.runner.run(plan)
        if rng.random() < 0.5:
            rig.loop.abort(rng.choice(plan.chunks).seq_id)
        for out in rig.scheduler.commit(plan, result):
            rig.loop._extend(out)
        rig.scheduler.check()
    rig.run()
    rig.check_idle()
    finished = [each for each in asked if rig.answers[each].finish is not FinishReason.ABORT]
    assert 20 < len(finished) < 180
    for request_id in finished:
        assert rig.answers[request_id].outcome == reference.outcome(*asked[request_id])


def test_no_conversation_sees_anothers_words() -> None:
    rng = random.Random(4)
    reference = Reference()
    rig = Rig(n_blocks=60, budget=128)
    histories = [list(prompt(rng, rng.randint(5, 60))) for _ in range(200)]
    sent: list[list[int]] = []
    for _ in range(3):
        order = rng.sample(range(200), 200)
        ids = {each: rig.submit(histories[each], greedy(8)) for each in order}
        rig.run()
        for each, request_id in ids.items():
            answer = rig.answers[request_id]
            assert answer.outcome == reference.outcome(histories[each], greedy(8))
            known = max((_common(histories[each], other) for other in sent), default=0)
            assert answer.last.cached_tokens <= known
            histories[each] += answer.tokens
        sent = [list(history) for history in histories]
        for history in histories:
            history.extend(prompt(rng, 12))
    rig.check_idle()


def _common(left: list[int], right: list[int]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
