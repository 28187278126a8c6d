"""The look-up by bisection, where it is used, says what a walk over every key says."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.index.backends import use_arrays
from gateway.index.table import PrefixTable
from gateway.learn import Learner, Served
from shared.blocks import chain_keys
from shared.events import EventBatch, removed, stored
from shared.types import BlockKey, Epoch, WorkerId

LEARNED = [WorkerId("l1"), WorkerId("l2"), WorkerId("l3")]
TOLD = WorkerId("told")
TURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=5)
"""A prompt: pieces of text by number, each with a length in granules."""


def prompt_of(turns: list[tuple[int, int]]) -> list[BlockKey]:
    tokens = [token for piece, size in turns for token in [piece * 1000 + size] * size * 16]
    return chain_keys(b"r" * 16, tokens)


class Plain:
    """What each worker holds, as sets."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {worker: set() for worker in (*LEARNED, TOLD)}

    def match(self, prompt: list[BlockKey]) -> dict[str, int]:
        depths = {
            worker: next((at for at, key in enumerate(prompt) if key not in held), len(prompt))
            for worker, held in self.held.items()
        }
        return {worker: 16 * depth for worker, depth in depths.items() if depth}


class Both:
    """A table, fed as the gateway does, and the sets."""

    def __init__(self, storage: str, most: int) -> None:
        self.table = PrefixTable(most, Random(5))
        if storage == "arrays":
            use_arrays(self.table)
            self.table.compact_from = 60
        self.learner, self.plain, self.seq = Learner(), Plain(), 0
        for worker in (*LEARNED, TOLD):
            self.table.join(worker, Epoch(1), 1)
        for number, worker in enumerate(LEARNED):
            self.learner.join(worker, 1, 1024 + 800 * number)

    def serve(self, worker: WorkerId, prompt: list[BlockKey], cached: int | None) -> None:
        held, clock = self.plain.held[worker], self.learner.clock(worker)
        expected = self.plain.match(prompt).get(worker, 0)
        request = Served(prompt, 16 * len(prompt) + 1, 40, expected, cached, clock)
        change = self.learner.served(worker, request)
        if change is None:
            return
        if change.cleared:
            held.clear()
        held.difference_update(change.lost)
        held.update(change.stored)
        held.difference_update(change.evicted)
        self.table.learn(worker, change)

    def tell(self, prompt: list[BlockKey], seed: int) -> None:
        """Events store a prompt and remove any keys, holes in prompts included."""
        held, rng = self.plain.held[TOLD], Random(seed)
        gone = rng.sample(sorted(held), len(held) // 3)
        held.difference_update(gone)
        held.update(prompt)
        self.seq += 1
        events = (removed(gone), stored(list(prompt), None))
        batch = EventBatch(TOLD, Epoch(1), "worker", self.seq, 0.0, 1, events)
        assert self.table.apply(batch).reason == "applied"

    def forget(self, worker: WorkerId) -> None:
        self.plain.held[worker].clear()
        self.learner.reset(worker)
        self.table.forget(worker)
        self.table.join(worker, Epoch(1), 1)
        self.seq = 0 if worker == TOLD else self.seq

    def matched(self, prompt: list[BlockKey]) -> dict[str, int]:
        return {worker: match.tokens for worker, match in self.table.match(prompt).items()}


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("serve"), TURNS, st.sampled_from(LEARNED), st.sampled_from((None, 0, 64, 9999))
        ),
        st.tuples(st.just("tell"), TURNS, st.integers(0, 99), st.none()),
        st.tuples(st.just("forget"), TURNS, st.sampled_from([*LEARNED, TOLD]), st.none()),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("storage", ["dict", "arrays"])
@settings(max_examples=30, deadline=None)
@given(STEPS)
def test_matched_tokens_are_those_of_a_plain_walk(
    storage: str, steps: list[tuple[str, list[tuple[int, int]], Any, Any]]
) -> None:
    both = Both(storage, 10**6)
    prompts: list[list[BlockKey]] = []
    for what, turns, whom, cached in steps:
        prompt = prompt_of(turns)
        prompts.append(prompt)
        if what == "serve":
            told = None if cached is None else min(cached, 16 * len(prompt))
            both.serve(whom, prompt, told)
        elif what == "tell":
            both.tell(prompt, whom)
        else:
            both.forget(whom)
        for known in prompts:
            assert both.matched(known) == both.plain.match(known)
    both.table.check()


@pytest.mark.parametrize("storage", ["dict", "arrays"])
def test_after_entries_were_dropped_a_hole_still_ends_a_match(storage: str) -> None:
    both = Both(storage, 150)
    rng = Random(2)
    for n in range(40):
        prompt = prompt_of([(n % 3, 30), (n, 20)])
        both.serve(LEARNED[n % 3], prompt, None)
        both.tell(prompt, n)
        held = {
            worker: {
                key for key in rng.sample(prompt, len(prompt)) if worker in both.table.match([key])
            }
            for worker in both.plain.held
        }
        for worker, tokens in both.matched(prompt).items():
            whole = next((i for i, k in enumerate(prompt) if k not in held[worker]), len(prompt))
            assert tokens == 16 * whole
    assert both.table.entries <= 150 + 2
    both.table.check()
