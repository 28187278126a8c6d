"""The cache must be invisible in answers, and visible in what is computed."""

from __future__ import annotations

import random

import pytest
from enginerig import OTHER_ROOT, ROOT, Reference, Rig, greedy, prompt

from shared.blocks import chain_keys
from worker.sequence import FinishReason, SamplingParams

B = 16


@pytest.mark.parametrize("budget", [1, B - 1, B, B + 1, 512])
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 8 * B])
def test_a_repeat_is_equal_and_reuses_all_but_the_last_tokens_block(
    length: int, budget: int
) -> None:
    tokens = prompt(random.Random(length), length)
    params = greedy(32, logprobs=5, ignore_eos=True)
    expected = Reference().outcome(tokens, params)
    rig = Rig(budget=budget)
    for turn in range(4):
        answer = rig.answer(tokens, params)
        assert answer.outcome == expected
        assert answer.last.cached_tokens == (0 if turn == 0 else (length - 1) // B * B)
        assert answer.last.prompt_tokens == length
    rig.check_idle()


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16, 24, 32, 100])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_any_block_size_and_budget(block_size: int, budget: int) -> None:
    rng = random.Random(block_size)
    reference = Reference()
    rig = Rig(n_blocks=-(-600 // block_size), block_size=block_size, budget=budget)
    shared = prompt(rng, 70)
    asked = [shared[: rng.randint(1, 70)] + prompt(rng, rng.randint(0, 9)) for _ in range(25)]
    params = greedy(12)
    ids = [rig.submit(tokens, params) for tokens in asked]
    rig.run()
    for request_id, tokens in zip(ids, asked, strict=True):
        assert rig.answers[request_id].outcome == reference.outcome(tokens, params)
    rig.check_idle()


@pytest.mark.parametrize("block_size", [8, 12, 16, 24, 32])
def test_announced_keys_are_those_of_the_prompts_chain(block_size: int) -> None:
    rig = Rig(n_blocks=60, block_size=block_size)
    tokens = prompt(random.Random(0), 200)
    rig.answer(tokens, greedy(1))
    stride = {8: 1, 12: 3, 16: 1, 24: 3, 32: 2}[block_size]
    full_blocks = 200 // block_size * block_size // 16
    expected = chain_keys(ROOT, tokens)[stride - 1 : full_blocks : stride]
    assert sorted(rig.pool.snapshot_keys()) == sorted(expected)
    rig.check_idle()


def test_events_of_a_step_leave_before_its_deltas() -> None:
    rig = Rig()
    first = rig.submit(prompt(random.Random(1), 40), greedy(1))
    rig.step()
    assert rig.order == ["events", first]


def test_a_next_turn_reuses_the_answer_too() -> None:
    rig = Rig()
    first = prompt(random.Random(1), 20)
    answer = rig.answer(first, greedy(60, ignore_eos=True))
    # The newest token is sampled but not computed: 79 of 80 tokens are in the cache.
    second = [*first, *answer.tokens, *prompt(random.Random(2), 8)]
    assert rig.answer(second, greedy(4)).last.cached_tokens == 79 // B * B


def test_scopes_share_nothing() -> None:
    rig = Rig()
    tokens = prompt(random.Random(1), 100)
    rig.answer(tokens, greedy(1))
    assert rig.answer(tokens, greedy(1), root=OTHER_ROOT).last.cached_tokens == 0
    assert rig.answer(tokens, greedy(1), root=ROOT).last.cached_tokens == 96


def test_identical_prompts_at_once_compute_their_prefix_once() -> None:
    for turn in range(20):
        rng = random.Random(turn)
        tokens = prompt(rng, 10 * B)
        rig = Rig(n_blocks=400, budget=[8, 64, 1000][turn % 3], max_running=40)
        ids = [rig.submit(tokens, greedy(8)) for _ in range(32)]
        rig.run()
        expected = Reference().outcome(tokens, greedy(8))
        assert all(rig.answers[request_id].outcome == expected for request_id in ids)
        # One computes ten blocks, the others only the one with the last token.
        assert rig.loop.stats.prefill_computed_tokens == (10 + 31) * B
        assert rig.loop.stats.prefill_cached_tokens == 31 * 9 * B
        rig.check_idle()


def test_siblings_that_differ_at_the_end_compute_their_common_part_once() -> None:
    rng = random.Random(5)
    shared = prompt(rng, 9 * B)
    tails = [prompt(rng, B) for _ in range(16)]
    rig = Rig(n_blocks=400, budget=48)
    ids = [rig.submit(shared + tail, greedy(8)) for tail in tails]
    rig.run()
    assert rig.loop.stats.prefill_computed_tokens == 9 * B + 16 * B
    reference = Reference()
    for request_id, tail in zip(ids, tails, strict=True):
        assert rig.answers[request_id].outcome == reference.outcome(shared + tail, greedy(8))


@pytest.mark.parametrize("budget", [10 * B - 1, 10 * B, 4 * B + 1])
def test_a_continuation_waits_for_the_last_block_too(budget: int) -> None:
    rng = random.Random(14)
    tokens, more = prompt(rng, 10 * B), prompt(rng, 20)
    rig = Rig(budget=budget)
    rig.submit(tokens, greedy(8))
    rig.submit(tokens + more, greedy(8))
    rig.run()
    assert rig.loop.stats.prefill_computed_tokens == 10 * B + 20
    assert rig.answers["1"].outcome == Reference().outcome(tokens + more, greedy(8))


def test_a_held_back_sibling_goes_on_when_the_one_it_waits_for_is_aborted() -> None:
    tokens = prompt(random.Random(6), 20 * B)
    rig = Rig(budget=2 * B)
    first, second = (rig.submit(tokens, greedy(4)) for _ in range(2))
    rig.step(3)
    assert rig.scheduler.load().running == 1
    rig.loop.abort(first)
    rig.run()
    assert rig.answers[first].finish is FinishReason.ABORT
    assert rig.answers[second].outcome == Reference().outcome(tokens, greedy(4))
    assert rig.answers[second].last.cached_tokens == 6 * B
    rig.check_idle()


def test_a_held_back_sibling_does_not_hold_back_strangers() -> None:
    rig = Rig(budget=2 * B + 4)
    tokens = prompt(random.Random(7), 20 * B)
    rig.submit(tokens, greedy(4))
    rig.submit(tokens, greedy(4))
    rig.step()
    stranger = rig.submit(prompt(random.Random(8), 4), greedy(1))
    rig.step()
    assert rig.answers[stranger].finish is None  # the prefill before it took the whole budget
    rig.run()
    order = [chunk.seq_id for plan in rig.runner.plans for chunk in plan.chunks]
    assert order.index(stranger) < order.index("1")


def test_an_urgent_sibling_makes_the_one_it_waits_for_urgent() -> None:
    rig = Rig(n_blocks=200, budget=B)
    rng = random.Random(9)
    shared = prompt(rng, 20 * B)
    owner = rig.submit(shared, greedy(1), priority=5)
    rig.step()
    other = rig.submit(prompt(rng, 20 * B), greedy(1), priority=1)
    rig.step()
    urgent = rig.submit(shared, greedy(1), priority=0)
    rig.run()
    order = [chunk.seq_id for plan in rig.runner.plans for chunk in plan.chunks if chunk.sample]
    assert order == [urgent, other, owner], "only as long as it computes what is waited for"
    assert rig.answers[urgent].last.cached_tokens == 19 * B


@pytest.mark.parametrize("n_chunks", range(1, 10))
def test_what_an_aborted_prefill_leaves_behind_is_sound(n_chunks: int) -> None:
    tokens = prompt(random.Random(3), 20 * B)
    rig = Rig(budget=2 * B)
    aborted = rig.submit(tokens, greedy(8))
    rig.step(n_chunks)
    rig.loop.abort(aborted)
    rig.check_idle()
    answer = rig.answer(tokens, greedy(8))
    assert answer.last.cached_tokens == 2 * B * n_chunks
    assert answer.outcome == Reference().outcome(tokens, greedy(8))


def test_prompts_that_continue_into_a_stopped_answer() -> None:
    rng = random.Random(4)
    rig = Rig(n_blocks=200)
    starts = [prompt(rng, rng.randint(1, 60)) for _ in range(8)]
    params = greedy(60, ignore_eos=True)
    reference = Reference()
    texts = [reference.outcome(start, params) for start in starts]
    stops = [str(text[0])[20:23] for text in texts]
    ids = [
        rig.submit(start, greedy(60, ignore_eos=True, stop=(stop,)))
        for start, stop in zip(starts, stops, strict=True)
    ]
    rig.run()
    for request_id, start, text, stop in zip(ids, starts, texts, stops, strict=True):
        answer = rig.answers[request_id]
        assert answer.text == str(text[0])[: str(text[0]).index(stop)]
        assert answer.last.stop_reason == stop
        for extra in (0, 1, 17):
            further = [*start, *answer.tokens, *prompt(rng, extra)]
            assert rig.answer(further, greedy(8)).outcome == reference.outcome(further, greedy(8))
    rig.check_idle()


def test_a_flush_forgets_and_running_requests_go_on() -> None:
    tokens = prompt(random.Random(11), 12 * B)
    rig = Rig(budget=2 * B)
    running = rig.submit(tokens, greedy(40, ignore_eos=True))
    rig.step(3)
    waiting = rig.submit(tokens, greedy(40, ignore_eos=True))
    rig.pool.clear()
    rig.scheduler.check()
    rig.run()
    expected = Reference().outcome(tokens, greedy(40, ignore_eos=True))
    assert rig.answers[running].outcome == rig.answers[waiting].outcome == expected
    assert rig.answers[waiting].last.cached_tokens == 0
    rig.check_idle()
    assert rig.answer(tokens, greedy(1)).last.cached_tokens == 11 * B


def test_without_a_cache_nothing_is_reused_or_announced() -> None:
    tokens = prompt(random.Random(12), 5 * B)
    rig = Rig(budget=200, caching=False)
    for _ in range(2):
        assert rig.answer(tokens, greedy(4)).last.cached_tokens == 0
    for _ in range(3):
        rig.submit(tokens, greedy(4))
    rig.step()
    assert rig.scheduler.load().running == 3
    rig.run()
    assert rig.events == []
    assert rig.pool.n_free == rig.pool.n_blocks


def test_a_seed_does_not_depend_on_neighbours_and_no_seed_differs() -> None:
    tokens = prompt(random.Random(13), 40)
    seeded = SamplingParams(max_tokens=32, temperature=0.8, seed=42)
    alone = Reference().outcome(tokens, seeded)
    rig = Rig(n_blocks=200, budget=48)
    for seed in (None, 7):
        other = SamplingParams(max_tokens=32, temperature=0.8, seed=seed)
        ids = [rig.submit(tokens, seeded), *(rig.submit(tokens, other) for _ in range(7))]
        rig.run()
        assert rig.answers[ids[0]].outcome == alone
        texts = {rig.answers[request_id].text for request_id in ids[1:]}
        assert (len(texts) > 1) == (seed is None)
