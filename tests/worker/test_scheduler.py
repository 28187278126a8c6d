"""What goes into a step, looked at plan by plan."""

from __future__ import annotations

import random

import pytest
from enginerig import ROOT, Rig, greedy, prompt

from shared.blocks import chain_keys, pack_tokens
from worker.sequence import BlockChain, FinishReason, Sequence

B = 16


def ids_of(rig: Rig) -> list[list[str]]:
    return [[chunk.seq_id for chunk in plan.chunks] for plan in rig.runner.plans]


def test_decodes_come_first_then_prefills_then_admission_within_the_budget() -> None:
    rng = random.Random(1)
    rig = Rig(n_blocks=100, budget=20)
    for length in (10, 40, 30):
        rig.submit(prompt(rng, length), greedy(50, ignore_eos=True))
    rig.step(3)
    plans = [
        [(chunk.seq_id, len(chunk.tokens), chunk.sample) for chunk in plan.chunks]
        for plan in rig.runner.plans
    ]
    assert plans == [
        [("0", 10, True), ("1", 10, False)],
        [("0", 1, True), ("1", 19, False)],
        [("0", 1, True), ("1", 11, True), ("2", 8, False)],
    ]


def test_chunks_carry_the_blocks_they_need_and_no_more() -> None:
    rig = Rig(budget=24)
    rig.submit(prompt(random.Random(1), 70), greedy(2))
    rig.run()
    assert [len(plan.chunks[0].blocks) for plan in rig.runner.plans] == [2, 3, 5, 5]
    assert [plan.kind for plan in rig.runner.plans] == ["prefill"] * 3 + ["decode"]
    last = rig.runner.plans[-1].chunks[0].blocks
    assert list(last) == list(range(last[0], last[0] + 5))


def test_first_come_first_served_even_if_the_first_is_big() -> None:
    rng = random.Random(2)
    rig = Rig(n_blocks=20, budget=64)
    rig.submit(prompt(rng, 8 * B), greedy(40, ignore_eos=True))
    rig.step()
    big = rig.submit(prompt(rng, 15 * B), greedy(1))
    small = rig.submit(prompt(rng, 10), greedy(1))
    rig.run()
    order = [each for ids in ids_of(rig) for each in ids]
    assert order.index(big) < order.index(small)


def test_lower_priority_numbers_go_first() -> None:
    rng = random.Random(3)
    rig = Rig(budget=32, max_running=1)
    ids = [rig.submit(prompt(rng, 20), greedy(1), priority=each) for each in (3, 1, 2, 1)]
    rig.run()
    assert [each for plan in ids_of(rig) for each in plan] == [ids[1], ids[3], ids[2], ids[0]]


def test_an_urgent_request_gets_the_budget_of_running_prefills() -> None:
    rng = random.Random(4)
    rig = Rig(budget=32)
    rig.submit(prompt(rng, 320), greedy(1), priority=5)
    rig.step()
    urgent = rig.submit(prompt(rng, 20), greedy(1))
    rig.step()
    assert rig.answers[urgent].finish is FinishReason.LENGTH


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    rng = random.Random(5)
    rig = Rig(n_blocks=10, budget=200)
    rig.submit(prompt(rng, 5 * B), greedy(17, ignore_eos=True))
    tight = rig.submit(prompt(rng, 5 * B), greedy(1))
    rig.step()
    assert (rig.scheduler.load().running, rig.scheduler.load().waiting) == (1, 1)
    rig.run()
    assert rig.answers[tight].finish is FinishReason.LENGTH
    assert rig.loop.stats.preemptions == 0


def test_max_running_is_kept() -> None:
    rng = random.Random(6)
    rig = Rig(n_blocks=100, budget=200, max_running=3)
    for _ in range(9):
        rig.submit(prompt(rng, 20), greedy(5))
    while rig.loop.step():
        assert rig.scheduler.load().running <= 3


def test_load_counts_what_is_left_to_compute() -> None:
    rng = random.Random(7)
    rig = Rig(budget=32, prefill_s_per_token=0.001, decode_s_per_step=0.02)
    shared = prompt(rng, 5 * B)
    rig.answer(shared, greedy(3, ignore_eos=True))
    rig.submit(prompt(rng, 100), greedy(1))
    rig.submit(shared, greedy(1))
    assert rig.scheduler.load().queued_prefill_tokens == 100 + B
    rig.step()
    load = rig.scheduler.load()
    assert (load.running, load.waiting, load.queued_prefill_tokens) == (1, 1, 68 + B)
    assert (load.blocks_total, load.blocks_used, load.blocks_cached) == (40, 7, 5)
    assert load.prefill_tokens_per_s == pytest.approx(1000.0)
    assert load.decode_tokens_per_s == pytest.approx(50.0)


def test_end_tokens_and_their_exceptions() -> None:
    end = {257: 100.0}
    tokens = prompt(random.Random(8), 20)
    stopped = Rig().answer(tokens, greedy(9, logit_bias=end))
    assert (stopped.finish, stopped.text, stopped.tokens) == (FinishReason.STOP, "", [257])
    assert stopped.last.stop_reason == 257
    ignored = Rig().answer(tokens, greedy(9, logit_bias=end, ignore_eos=True))
    assert (ignored.finish, len(ignored.tokens)) == (FinishReason.LENGTH, 9)
    later = Rig().answer(tokens, greedy(9, logit_bias=end, min_tokens=4))
    assert (later.finish, len(later.tokens)) == (FinishReason.STOP, 5), "4, then the end"
    own = Rig().answer(tokens, greedy(9, logit_bias={98: 100.0}, stop_token_ids=(98,)))
    assert (own.finish, own.text, own.last.stop_reason) == (FinishReason.STOP, "", 98)


def test_an_id_is_taken_once() -> None:
    rig = Rig()
    seq = Sequence("a", [1, 2], 2, greedy(1), ROOT, 0.0)
    rig.scheduler.add(seq)
    with pytest.raises(ValueError, match="already"):
        rig.scheduler.add(seq)
    assert rig.scheduler.abort("a") is seq
    assert rig.scheduler.abort("a") is None
    assert seq.finish is FinishReason.ABORT


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 40])
def test_a_chain_has_the_prompts_keys_from_any_starting_block(block_size: int) -> None:
    tokens = list(prompt(random.Random(9), 500))
    expected = chain_keys(ROOT, tokens)
    chain = BlockChain(ROOT, block_size)
    units = chain.units(tokens)
    assert b"".join(units) == pack_tokens(tokens[: len(units) * block_size])
    for first in (0, len(units) // 2, 0, len(units) - 1):
        for index in range(first, len(units)):
            end = (index + 1) * block_size
            key = chain.key(index)
            assert key == (None if end % 16 else expected[end // 16 - 1])


def test_a_chain_grows_with_its_tokens() -> None:
    tokens = list(prompt(random.Random(10), 30))
    chain = BlockChain(ROOT, 16)
    assert len(chain.units(tokens)) == 1
    assert chain.key(0) == chain_keys(ROOT, tokens)[0]
    tokens += prompt(random.Random(11), 20)
    assert len(chain.units(tokens)) == 3
    assert [chain.key(1), chain.key(2)] == chain_keys(ROOT, tokens)[1:]
