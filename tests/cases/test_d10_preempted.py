"""D10: preempted requests continue as if alone, with every kind of parameter at once."""

from __future__ import annotations

import random

import pytest
from enginerig import Reference, Rig, greedy, prompt

from worker.sequence import SamplingParams

KINDS = (
    greedy(120, ignore_eos=True),
    greedy(100, ignore_eos=True, logprobs=2),
    greedy(120, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(max_tokens=120, temperature=0.9, seed=11, ignore_eos=True),
    greedy(120, ignore_eos=True, stop=("eeee", "tat")),
    greedy(120, min_tokens=110),
)


@pytest.mark.parametrize("seed", range(4))
def test_twelve_that_preempt_each_other(seed: int) -> None:
    rng = random.Random(seed)
    reference = Reference()
    rig = Rig(n_blocks=90, block_size=4, budget=rng.choice([16, 64]))
    asked = {}
    for turn in range(24):
        job = prompt(rng, rng.randint(20, 60)), KINDS[turn % len(KINDS)]
        asked[rig.submit(*job, priority=rng.choice([0, 0, 1]))] = job
        if turn >= 12:
            for _ in range(20):
                rig.loop.step()
                rig.scheduler.check()
    rig.run()
    assert rig.loop.stats.preemptions > 20
    for request_id, job in asked.items():
        answer = rig.answers[request_id]
        assert answer.outcome == reference.outcome(*job)
        assert answer.last.prompt_tokens == len(job[0])
        counts = [delta.output_tokens for delta in answer.deltas]
        assert counts == list(range(1, len(counts) + 1)), "no token doubled, none left out"
    rig.check_idle()
