"""D08: prompts that together outgrow the pool never hold it half each; somebody always goes on."""

from __future__ import annotations

import random

import pytest
from enginerig import Reference, Rig, greedy, prompt

B = 16


@pytest.mark.parametrize("budget", [16, 64, 2000])
@pytest.mark.parametrize("n_blocks", [62, 100, 119])
def test_big_prompts_then_growing_answers(budget: int, n_blocks: int) -> None:
    rng = random.Random(budget)
    reference = Reference()
    rig = Rig(n_blocks=n_blocks, budget=budget)
    asked = {}
    for _ in range(4):
        job = prompt(rng, 60 * B), greedy(8)
        asked[rig.submit(*job)] = job
    rig.step()
    for _ in range(12):
        job = prompt(rng, 30), greedy(200, ignore_eos=True)
        asked[rig.submit(*job)] = job
    while True:
        counters = rig.scheduler.counters
        done = counters.computed_tokens + counters.recomputed_tokens + counters.decode_tokens
        if not rig.loop.step():
            break
        rig.scheduler.check()
        after = counters.computed_tokens + counters.recomputed_tokens + counters.decode_tokens
        assert after > done, "each step makes progress"
    for request_id, job in asked.items():
        assert rig.answers[request_id].outcome == reference.outcome(*job)
    rig.check_idle()
