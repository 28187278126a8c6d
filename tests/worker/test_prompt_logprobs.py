"""Log-probabilities of prompt tokens through the engine: any chunks, cache, memory pressure."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from enginerig import Answer, Rig, greedy, prompt

from worker.sequence import TokenLogprob

B = 16
PARAMS = greedy(6, logprobs=2, prompt_logprobs=3, ignore_eos=True)


def scores_of(answer: Answer) -> tuple[TokenLogprob, ...]:
    """They come with the first token and never again."""
    given = [delta.prompt_logprobs for delta in answer.deltas]
    assert given[0] is not None
    assert given[1:] == [None] * (len(given) - 1)
    return given[0]


def alone(tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    """Of a fresh engine without a cache, all in one step."""
    return scores_of(Rig(n_blocks=200, budget=8192, caching=False).answer(tokens, PARAMS))


def test_one_for_each_token_but_the_first() -> None:
    tokens = prompt(random.Random(0), 30)
    scores = alone(tokens)
    assert len(scores) == 29
    assert all(len(entry.top) == 3 for entry in scores)
    assert len({entry.logprob for entry in scores}) > 20
    assert {entry.rank for entry in scores} == {1, 2, 3, 4, 5}
    for target, entry in zip(tokens[1:], scores, strict=True):
        assert (target in dict(entry.top)) == (entry.rank <= 3)
        assert all(a[1] >= b[1] for a, b in pairwise(entry.top))
    (single,) = (alone(tokens[:1]),)
    assert single == ()
    assert Rig().answer(tokens, greedy(4)).deltas[0].prompt_logprobs is None


@pytest.mark.parametrize("budget", [1, 7, B, 100])
@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, 100])
def test_any_chunks_cold_and_warm(budget: int, length: int) -> None:
    tokens = prompt(random.Random(length), length)
    rig = Rig(budget=budget)
    expected = alone(tokens)
    for _ in range(3):
        answer = rig.answer(tokens, PARAMS)
        assert scores_of(answer) == expected
        assert answer.last.cached_tokens == 0
    plain = rig.answer(tokens, greedy(4))
    assert plain.last.cached_tokens == (length - 1) // B * B
    assert scores_of(rig.answer(tokens, PARAMS)) == expected
    rig.check_idle()


def test_a_prompt_that_is_scored_waits_for_nobody_and_fills_the_cache() -> None:
    tokens = prompt(random.Random(1), 10 * B)
    rig = Rig(budget=B + 8)
    first = rig.submit(tokens, greedy(4))
    scored = rig.submit(tokens, PARAMS)
    rig.run()
    assert rig.loop.stats.held_back == 0
    assert scores_of(rig.answers[scored]) == alone(tokens)
    assert rig.answers[first].last.cached_tokens == 0
    other = prompt(random.Random(2), 10 * B)
    rig.submit(other, PARAMS)
    rig.step()
    later = rig.submit(other, greedy(4))
    rig.run()
    assert rig.answers[later].last.cached_tokens == 9 * B
    rig.check_idle()


@pytest.mark.parametrize("budget", [2, 3])
def test_preempted_within_the_prompt(budget: int) -> None:
    """The decoder, first in rank, grows until the prompt beside it must give way."""
    rig = Rig(n_blocks=40, block_size=4, budget=budget)
    tokens = prompt(random.Random(budget), 110)
    decoder = rig.submit(prompt(random.Random(9), 20), greedy(120, ignore_eos=True))
    rig.step(24 // budget)
    scored = rig.submit(tokens, PARAMS)
    interrupted = set()
    while rig.answers[scored].finish is None:
        rig.step()
        rig.scheduler.check()
        interrupted |= {len(seq.scores) for seq in rig.scheduler.roster.waiting if seq.preemptions}
    rig.run()
    assert any(0 < count < 109 for count in interrupted)
    assert scores_of(rig.answers[scored]) == alone(tokens)
    assert rig.answers[scored].last.cached_tokens == 0
    assert len(rig.answers[decoder].tokens) == 120
    rig.check_idle()


@pytest.mark.parametrize("budget", [5, 11, 64])
def test_many_under_memory_pressure(budget: int) -> None:
    rng = random.Random(budget)
    rig = Rig(n_blocks=60, block_size=4, budget=budget)
    jobs: dict[str, tuple[int, ...]] = {}
    shared = prompt(rng, 24)
    for turn in range(30):
        own = prompt(rng, rng.randint(1, 40))
        tokens = shared + own if turn % 2 else own
        params = greedy(rng.randint(40, 100), prompt_logprobs=3, ignore_eos=True)
        jobs[rig.submit(tokens, params)] = tokens
        for _ in range(rng.randint(0, 20)):
            rig.loop.step()
            rig.scheduler.check()
    rig.run()
    assert rig.loop.stats.preemptions > 20
    for request_id, tokens in jobs.items():
        assert scores_of(rig.answers[request_id]) == alone(tokens)
        assert rig.answers[request_id].last.cached_tokens == 0
    rig.check_idle()


def test_an_abort_within_the_prompt_and_a_lost_step_lose_nothing_else() -> None:
    tokens = prompt(random.Random(3), 8 * B)
    rig = Rig(budget=B)
    gone = rig.submit(tokens, PARAMS)
    kept = rig.submit(tokens[: 3 * B], PARAMS)
    rig.step(2)
    rig.loop.abort(gone)
    rig.run()
    assert scores_of(rig.answers[kept]) == alone(tokens[: 3 * B])
    lost = rig.submit(tokens, PARAMS)
    rig.step(2)
    rig.runner.fail_next = True
    rig.run()
    assert rig.answers[lost].deltas[-1].prompt_logprobs is None
    assert scores_of(rig.answer(tokens, PARAMS)) == alone(tokens)
    rig.check_idle()
