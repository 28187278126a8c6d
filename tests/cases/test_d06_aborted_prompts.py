"""D06: what an aborted, failed or stopped request may leave in the cache: only what is computed.

With the runner without torch, whose answers depend on what its blocks hold, and with a real model.
"""

from __future__ import annotations

import random

import pytest
from casemodel import TorchReference, TorchRig
from depth import DEPTH
from enginerig import Reference, Rig, greedy, prompt

pytestmark = pytest.mark.torch
B = 16
BROKEN = "\N{REPLACEMENT CHARACTER}"
KINDS = ["fake", "torch"]


class Pair:
    """An engine of one kind with steps of two blocks, and right answers."""

    def __init__(self, kind: str, n_blocks: int = 60, budget: int = 2 * B) -> None:
        self.make: type[Rig] | type[TorchRig] = Rig if kind == "fake" else TorchRig
        self.rig = self.make(n_blocks=n_blocks, budget=budget)
        self._fake = Reference()
        self._torch = RIGHT if kind == "torch" else None

    def check(self, tokens: tuple[int, ...], n: int = 12, **more: object) -> str:
        """The engine's answer is the right one; returns its text."""
        params = greedy(n, ignore_eos=True, **more)
        answer = self.rig.answer(tokens, params)
        if self._torch is None:
            assert answer.outcome == self._fake.outcome(tokens, params)
        else:
            right = self._torch.answer(tokens, params)
            assert (answer.text, answer.tokens) == (right.text, right.tokens)
        return answer.text

    def start(self, tokens: tuple[int, ...], steps: int, n: int = 12) -> str:
        """A request that has run for so many steps."""
        request_id = self.rig.submit(tokens, greedy(n, ignore_eos=True))
        self.rig.step(steps)
        return request_id


RIGHT = TorchReference()


@pytest.fixture(params=KINDS)
def pair(request) -> Pair:
    """Both kinds in turn."""
    return Pair(request.param)


@pytest.mark.parametrize("chunks", range(1, 10))
def test_aborted_in_the_prompt(pair, chunks) -> None:
    tokens = prompt(random.Random(f"D06 {chunks}"), 20 * B)
    request_id = pair.start(tokens, chunks)
    assert not pair.rig.answers[request_id].deltas
    pair.rig.loop.abort(request_id)
    pair.check(tokens)
    # What was computed before the abort was worth keeping.
    cached = pair.rig.loop.stats.prefill_cached_tokens
    assert 0 < cached <= chunks * 2 * B
    pair.check(tokens[: 7 * B + 3])
    pair.check((*tokens, *tokens[:B]))
    pair.rig.check_idle()


@pytest.mark.parametrize("made", [1, 2, B - 1, B, B + 1, 2 * B + 3])
def test_aborted_in_the_answer(pair, made) -> None:
    tokens = prompt(random.Random(f"answer {made}"), 3 * B + 5)
    request_id = pair.start(tokens, 2 + made, n=60)
    said = pair.rig.answers[request_id].tokens
    assert len(said) >= made - 1
    pair.rig.loop.abort(request_id)
    for kept in range(0, len(said) + 1, 5):
        pair.check((*tokens, *said[:kept]))
    pair.rig.check_idle()


def test_aborted_beside_others(pair) -> None:
    """Three share a prefix; one is aborted while another still reads what it computed."""
    rng = random.Random("beside")
    stem = prompt(rng, 6 * B)
    tails = [prompt(rng, 3 * B) for _ in range(3)]
    for steps in range(1, 9):
        ids = [pair.rig.submit((*stem, *tail), greedy(8, ignore_eos=True)) for tail in tails]
        pair.rig.step(steps)
        pair.rig.loop.abort(ids[steps % 3])
        pair.rig.run()
        for tail in tails:
            pair.check((*stem, *tail), 8)
    pair.rig.check_idle()


@pytest.mark.parametrize("at", [1, 5, B - 1, B, B + 1, 20, 2 * B])
def test_stopped_by_a_stop_string(pair, at) -> None:
    """Prompts that share a stopped request's prefix, and that go on into what it generated."""
    tokens = prompt(random.Random("stop"), 4 * B + 9)
    free = pair.rig.answer(tokens, greedy(40, ignore_eos=True))
    readable = BROKEN not in free.text[at : at + 3]
    stop = free.text[at : at + 3] if readable else next(c for c in free.text if c != BROKEN)
    pair.check(tokens, 40, stop=(stop,))
    for n in (0, at // 2, at, at + 1, min(at + 5, 39)):
        pair.check((*tokens, *free.tokens[:n]))
        pair.check((*tokens, *free.tokens[:n], 97))
    pair.check((*tokens[: 2 * B], 97))
    pair.rig.check_idle()


def test_a_storm_of_aborts(pair) -> None:
    """Prompts that branch off from each other, most of them aborted, on a small pool."""
    rng = random.Random("storm")
    small = Pair("fake" if pair.make is Rig else "torch", n_blocks=40)
    known = [prompt(rng, rng.randint(2 * B, 12 * B))]
    for _ in range(20 * DEPTH):
        stem = rng.choice(known)
        tokens = (*stem[: rng.randint(0, len(stem))], *prompt(rng, rng.randint(1, 5 * B)))[: 14 * B]
        known.append(tokens)
        ids = [
            small.rig.submit(each, greedy(9)) for each in rng.sample(known, k=min(3, len(known)))
        ]
        small.rig.step(rng.randint(1, 6))
        for each in ids[: rng.randint(1, 3)]:
            small.rig.loop.abort(each)
        small.check(rng.choice(known), 6)
    small.rig.run()
    small.rig.check_idle()
