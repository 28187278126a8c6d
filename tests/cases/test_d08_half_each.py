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


@pytest.mark.parametrize("budget", [1, 2])
@pytest.mark.parametrize("block_size", [1, 5])
def test_more_decoders_than_a_step_takes_on_too_few_blocks(budget: int, block_size: int) -> None:
    """Those whose turn it is may all have to make way: then the step is another one's."""
    reference = Reference()
    for seed in range(4):
        rng = random.Random(f"{budget} {block_size} {seed}")
        rig = Rig(
            n_blocks=rng.choice([4, 5, 8]) if block_size > 1 else 40,
            block_size=block_size,
            budget=budget,
            max_running=rng.choice([2, 5, 24]),
        )
        asked = {}
        for _ in range(16):
            length = rng.randint(1, rig.scheduler.max_len // 2)
            job = prompt(rng, length), greedy(rng.randint(1, rig.scheduler.max_len - length))
            asked[rig.submit(*job, priority=rng.choice([-1, 0, 0, 1]))] = job
            for _ in range(rng.randint(0, 3)):
                rig.loop.step()
        rig.run()  # a step without work while somebody waits would raise
        for request_id, job in asked.items():
            assert rig.answers[request_id].outcome == reference.outcome(*job)
        rig.check_idle()
