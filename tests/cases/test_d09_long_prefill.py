"""D09: a long prefill does not freeze decodes, counted in steps and tokens."""

from __future__ import annotations

import random

import pytest
from enginerig import Rig, greedy, prompt


@pytest.mark.parametrize("budget", [8, 64, 256])
@pytest.mark.parametrize("decoders", [1, 4, 20])
def test_sixty_chunks_and_three_more(budget: int, decoders: int) -> None:
    """No decoder is without a token for more than 3 steps, no step computes more than a full chunk,
    and the prefill advances in each step that has space left."""
    rig = Rig(n_blocks=4000, budget=budget, max_running=40, max_model_len=60_000)
    rng = random.Random(budget)
    ids = [rig.submit(prompt(rng, 5), greedy(9000, ignore_eos=True)) for _ in range(decoders)]
    while any(not rig.answers[each].tokens for each in ids):
        rig.step()
    long = [rig.submit(prompt(rng, 60 * budget), greedy(1))]
    long += [rig.submit(prompt(rng, 8 * budget), greedy(1)) for _ in range(3)]
    silent = dict.fromkeys(ids, 0)
    worst = 0
    while any(rig.answers[each].finish is None for each in long):
        before = {each: len(rig.answers[each].tokens) for each in ids}
        rig.step()
        plan = rig.runner.plans[-1]
        assert plan.n_tokens <= budget
        assert plan.n_tokens > plan.n_decodes, "the prefill advances"
        for each in ids:
            said = len(rig.answers[each].tokens) > before[each]
            silent[each] = 0 if said else silent[each] + 1
        worst = max(worst, *silent.values())
    assert worst <= 3
