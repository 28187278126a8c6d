"""D03: identical prompts of one step never read what is not yet written.

50 rounds of 32 requests as in the case, with the real model and 8 tokens each.
"""

from __future__ import annotations

import random

import pytest
from casemodel import TorchReference, TorchRig, said
from enginerig import greedy, prompt

pytestmark = pytest.mark.torch
B = 16
PARAMS = greedy(8, ignore_eos=True)


@pytest.fixture(scope="module")
def reference() -> TorchReference:
    """Right answers, float64."""
    return TorchReference()


@pytest.mark.parametrize("budget", [24, 10 * B, 4096])
def test_thirty_two_identical_ones_on_a_cold_engine(reference, budget) -> None:
    rounds = {24: 10, 10 * B: 15, 4096: 25}[budget]
    rig = TorchRig(n_blocks=400, budget=budget, max_running=40)
    for turn in range(rounds):
        tokens = prompt(random.Random(f"{budget} {turn}"), 10 * B)
        rig.pool.clear()
        before = rig.loop.stats.prefill_computed_tokens
        ids = [rig.submit(tokens, PARAMS) for _ in range(32)]
        rig.run()
        expected = said(reference.answer(tokens, PARAMS))
        assert [said(rig.answers[each]) for each in ids] == [expected] * 32
        assert all(rig.answers[each].last.cached_tokens <= 9 * B for each in ids)
        # What was not computed was computed by one of the others, before.
        computed = rig.loop.stats.prefill_computed_tokens - before
        assert computed >= 10 * B + 31 * B
    rig.check_idle()


@pytest.mark.parametrize("budget", [50, 4096])
def test_sixteen_that_differ_in_the_last_block(reference, budget) -> None:
    rig = TorchRig(n_blocks=400, budget=budget, max_running=40)
    for turn in range(6):
        rng = random.Random(f"tails {turn}")
        shared = prompt(rng, 9 * B)
        asked = [shared + prompt(rng, B) for _ in range(16)]
        ids = [rig.submit(tokens, PARAMS) for tokens in asked]
        rig.run()
        for request_id, tokens in zip(ids, asked, strict=True):
            assert said(rig.answers[request_id]) == said(reference.answer(tokens, PARAMS))
    rig.check_idle()


def test_identical_ones_that_come_while_the_first_is_computed(reference) -> None:
    rig = TorchRig(n_blocks=400, budget=2 * B, max_running=40)
    for steps in range(12):
        tokens = prompt(random.Random(f"late {steps}"), 10 * B)
        ids = [rig.submit(tokens, PARAMS)]
        for _ in range(steps):
            rig.loop.step()
        ids += [rig.submit(tokens, PARAMS) for _ in range(5)]
        rig.run()
        expected = said(reference.answer(tokens, PARAMS))
        assert [said(rig.answers[each]) for each in ids] == [expected] * 6
    rig.check_idle()


def test_the_one_that_computes_leaves(reference) -> None:
    """The others waited for it: they go on, and read only what it had finished."""
    for steps in range(1, 8):
        rig = TorchRig(n_blocks=400, budget=24, max_running=40)
        tokens = prompt(random.Random(f"leaves {steps}"), 10 * B)
        first = rig.submit(tokens, PARAMS)
        ids = [rig.submit(tokens, PARAMS) for _ in range(5)]
        for _ in range(steps):
            rig.loop.step()
        rig.loop.abort(first)
        rig.run()
        expected = said(reference.answer(tokens, PARAMS))
        assert [said(rig.answers[each]) for each in ids] == [expected] * 5
        rig.check_idle()


def test_a_prompt_and_its_beginnings_at_once(reference) -> None:
    rig = TorchRig(n_blocks=400, budget=70, max_running=40)
    tokens = prompt(random.Random("nested"), 12 * B)
    asked = [tokens[: n * B // 2] for n in range(1, 25)]
    random.Random(1).shuffle(asked)
    ids = [rig.submit(each, PARAMS) for each in asked]
    rig.run()
    for request_id, each in zip(ids, asked, strict=True):
        assert said(rig.answers[request_id]) == said(reference.answer(each, PARAMS))
    rig.check_idle()
