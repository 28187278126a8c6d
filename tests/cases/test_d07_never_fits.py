"""D07: a prompt that can never fit is refused at once and blocks nobody.

A prompt that fits with an answer that does not runs, and ends with ``length`` at capacity.
"""

from __future__ import annotations

import random

import pytest
from enginerig import Reference, Rig, greedy, prompt

from shared.errors import ContextLengthExceeded
from worker.sequence import FinishReason

B = 16


@pytest.mark.parametrize("length", [64 * B, 64 * B + 1, 1500, 4095])
@pytest.mark.parametrize("busy", [False, True])
def test_larger_than_the_pool(length: int, busy: bool) -> None:
    rig = Rig(n_blocks=64, budget=128)
    rng = random.Random(length)
    if busy:
        rig.submit(prompt(rng, 600), greedy(50, ignore_eos=True))
        rig.step(3)
    big = rig.submit(prompt(rng, length), greedy(4))
    rig.loop.publish()
    assert isinstance(rig.answers[big].error, ContextLengthExceeded), "before any step"
    small = [rig.submit(prompt(rng, 40), greedy(4)) for _ in range(10)]
    for _ in range(20):
        rig.loop.step()
    assert all(rig.answers[each].finish is not None for each in small)
    rig.run()
    rig.check_idle()


@pytest.mark.parametrize("length", [1000, 64 * B - 1])
def test_an_answer_beyond_the_pool_ends_at_capacity(length: int) -> None:
    rig = Rig(n_blocks=64, budget=128)
    rng = random.Random(length)
    tokens = prompt(rng, length)
    big = rig.submit(tokens, greedy(500, ignore_eos=True))
    small = {}
    for _ in range(10):
        job = prompt(rng, 40), greedy(4)
        small[rig.submit(*job)] = job
    rig.run()
    answer = rig.answers[big]
    assert answer.finish is FinishReason.LENGTH
    assert len(answer.tokens) == 64 * B - length
    reference = Reference()
    for request_id, job in small.items():
        assert rig.answers[request_id].outcome == reference.outcome(*job)
    rig.check_idle()
