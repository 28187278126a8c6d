"""D05: an abort at any moment gives all blocks back.

Scaled: 600 requests with the real model here; the thousands are in ``test_d_served.py``.
"""

from __future__ import annotations

import random

import pytest
from casemodel import TorchReference, TorchRig, said
from enginerig import greedy, prompt

from worker.sequence import FinishReason, SamplingParams

pytestmark = pytest.mark.torch
B = 16


@pytest.mark.parametrize("budget", [8, 40, 512])
def test_aborted_at_random_times_some_twice(budget) -> None:
    rng = random.Random(budget)
    reference = TorchReference()
    rig = TorchRig(n_blocks=40, budget=budget)
    families = [prompt(rng, rng.randint(1, 12 * B)) for _ in range(30)]
    asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    doomed: list[tuple[int, str]] = []
    moment = 0
    while len(asked) < 200 or doomed:
        while len(doomed) < 30 and len(asked) < 200:
            job = rng.choice(families), greedy(rng.choice([1, 3, 20]))
            request_id = rig.submit(*job)
            asked[request_id] = job
            due = moment + rng.choice([0, 1, 2, 3, 5, 10, 30, 60])
            doomed.append((due, request_id))
            if rng.random() < 0.2:
                doomed.append((due + rng.randint(0, 2), request_id))
        for _, request_id in (each for each in doomed if each[0] <= moment):
            rig.loop.abort(request_id)
            rig.scheduler.check()
        doomed = [each for each in doomed if each[0] > moment]
        rig.loop.step()
        moment += 1
    rig.run()
    rig.check_idle()
    finished = [each for each in asked if rig.answers[each].finish is not FinishReason.ABORT]
    assert 4 < len(finished) < 196
    for request_id in finished:
        assert said(rig.answers[request_id]) == said(reference.answer(*asked[request_id]))
    whole(rig)


def whole(rig: TorchRig) -> None:
    """A request that needs the whole pool succeeds at once."""
    tokens = prompt(random.Random(7), 40 * B - 1)
    request_id = rig.submit(tokens, greedy(4))
    for _ in range(2 + len(tokens) // 8):
        if not rig.loop.step():
            break
    assert rig.answers[request_id].finish in (FinishReason.LENGTH, FinishReason.STOP)
    rig.run()
    rig.check_idle()


def test_aborted_in_the_step_that_ends_it() -> None:
    """The step is computed, and the abort comes before its result is taken in."""
    rng = random.Random(3)
    reference = TorchReference()
    rig = TorchRig(n_blocks=40, budget=48)
    families = [prompt(rng, rng.randint(1, 8 * B)) for _ in range(12)]
    asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    for _ in range(400):
        if len(asked) < 150:
            job = rng.choice(families), greedy(rng.choice([1, 2, 6]))
            asked[rig.submit(*job)] = job
        plan = rig.scheduler.plan()
        if plan is None:
            break
        result = rig.runner.run(plan)
        if rng.random() < 0.5:
            for _ in range(rng.choice([1, 1, 2])):
                rig.loop.abort(rng.choice(plan.chunks).seq_id)
        for out in rig.scheduler.commit(plan, result):
            rig.loop._extend(out)
        rig.scheduler.check()
    rig.run()
    rig.check_idle()
    finished = [each for each in asked if rig.answers[each].finish is not FinishReason.ABORT]
    assert 10 < len(finished) < 140
    for request_id in finished:
        assert said(rig.answers[request_id]) == said(reference.answer(*asked[request_id]))
    whole(rig)


@pytest.mark.parametrize("n_chunks", range(1, 10))
def test_what_is_left_of_a_prefill_is_right(n_chunks) -> None:
    """Aborted after k chunks; the whole prompt then reads what was finished (D06)."""
    tokens = prompt(random.Random(5), 20 * B)
    rig = TorchRig(n_blocks=40, budget=2 * B)
    aborted = rig.submit(tokens, greedy(8))
    for _ in range(n_chunks):
        rig.loop.step()
    rig.loop.abort(aborted)
    rig.check_idle()
    answer = rig.answer(tokens, greedy(8))
    assert said(answer) == said(TorchReference().answer(tokens, greedy(8)))
    assert answer.last.cached_tokens == 2 * B * n_chunks
