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
from shared.blocks import chain_keys, pack_keys
from shared.events import CacheCleared, CacheEvent, EventBatch, Snapshot, removed, stored
from shared.types import BlockKey, Epoch, WorkerId

LEARNED = [WorkerId("l1"), WorkerId("l2"), WorkerId("l3")]
TOLD = WorkerId("told")
OURS = WorkerId("ours")
"""Evicts leaves first, and says so."""
WRONG = WorkerId("wrong")
"""Says so, and does not."""
EVERYBODY = (*LEARNED, TOLD, OURS, WRONG)
TURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=5)
"""A prompt: pieces of text by number, each with a length in granules."""


def prompt_of(turns: list[tuple[int, int]]) -> list[BlockKey]:
    tokens = [token for piece, size in turns for token in [piece * 1000 + size] * size * 16]
    return chain_keys(b"r" * 16, tokens)


class Plain:
    """What each worker holds, as sets."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {worker: set() for worker in EVERYBODY}

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
        self.learner, self.plain = Learner(), Plain()
        self.seqs = dict.fromkeys(EVERYBODY, 0)
        self.parents: dict[int, int | None] = {}
        for worker in EVERYBODY:
            self.table.join(worker, Epoch(1), 1, closed=worker in (OURS, WRONG))
        for number, worker in enumerate(LEARNED):
            self.learner.join(worker, 1, 1024 + 800 * number)
            self.table.attach(worker, self.learner.contents(worker))

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

    def tell(self, worker: WorkerId, prompt: list[BlockKey], seed: int) -> None:
        """Events store a prompt and remove any keys, holes in prompts included."""
        held, rng = self.plain.held[worker], Random(seed)
        gone = rng.sample(sorted(held), len(held) // 3)
        held.difference_update(gone)
        held.update(prompt)
        self.apply(worker, removed(gone), stored(list(prompt), None))

    def tell_ours(self, prompt: list[BlockKey], seed: int) -> None:
        """Events evict some leaves, and store what of a prompt is not there below what is."""
        held, rng = self.plain.held[OURS], Random(seed)
        self.parents.update(zip(prompt, [None, *prompt], strict=False))
        gone: list[int] = []
        for _ in range(rng.randrange(60)):
            inner = {self.parents[key] for key in held}
            leaves = sorted(held - inner)
            if leaves:
                gone.append(rng.choice(leaves))
                held.discard(gone[-1])
        depth = self.plain.match(prompt).get(OURS, 0) // 16
        held.update(prompt)
        cut = rng.randrange(len(gone) + 1)
        new = stored(list(prompt[depth:]), prompt[depth - 1] if depth else None)
        self.apply(OURS, removed(gone[:cut]), removed(gone[cut:]), new)

    def snapshot(self, worker: WorkerId) -> None:
        """The whole contents anew, in any order."""
        self.apply(worker, Snapshot(pack_keys(sorted(self.plain.held[worker]))))

    def apply(self, worker: WorkerId, *events: CacheEvent) -> None:
        self.seqs[worker] += 1
        batch = EventBatch(worker, Epoch(1), "worker", self.seqs[worker], 0.0, 1, events)
        assert self.table.apply(batch).reason == "applied"

    def forget(self, worker: WorkerId) -> None:
        self.plain.held[worker].clear()
        self.learner.reset(worker)
        self.table.forget(worker)
        self.table.join(worker, Epoch(1), 1, closed=worker in (OURS, WRONG))
        if worker in LEARNED:
            self.table.attach(worker, self.learner.contents(worker))
        self.seqs[worker] = 0

    def matched(self, prompt: list[BlockKey]) -> dict[str, int]:
        return {worker: match.tokens for worker, match in self.table.match(prompt).items()}


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("serve"), TURNS, st.sampled_from(LEARNED), st.sampled_from((None, 0, 64, 9999))
        ),
        st.tuples(st.just("tell"), TURNS, st.integers(0, 99), st.just(TOLD)),
        st.tuples(st.just("ours"), TURNS, st.integers(0, 99), st.none()),
        st.tuples(st.just("snapshot"), TURNS, st.sampled_from([TOLD, OURS]), st.none()),
        st.tuples(st.just("forget"), TURNS, st.sampled_from([*LEARNED, TOLD, OURS]), st.none()),
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
            both.tell(cached, prompt, whom)
        elif what == "ours":
            both.tell_ours(prompt, whom)
        elif what == "snapshot":
            both.snapshot(whom)
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
        both.tell(TOLD, prompt, n)
        held = {
            worker: {
                key for key in rng.sample(prompt, len(prompt)) if worker in both.table.match([key])
            }
            for worker in both.plain.held
        }
        for worker, tokens in both.matched(prompt).items():
            if worker in LEARNED:  # only beginnings of prompts are known there, and stay so
                half = len(prompt) // 2
                assert both.matched(prompt[:half]).get(worker, 0) == min(tokens, 16 * half)
                continue
            whole = next((i for i, k in enumerate(prompt) if k not in held[worker]), len(prompt))
            assert tokens == 16 * whole
    assert both.table.entries <= 150 + 2
    both.table.check()


@pytest.mark.parametrize("storage", ["dict", "arrays"])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(TURNS, st.integers(0, 99), st.booleans()), min_size=1, max_size=8))
def test_a_hole_where_none_should_be_is_seen(
    storage: str, steps: list[tuple[list[tuple[int, int]], int, bool]]
) -> None:
    both = Both(storage, 10**6)
    for turns, seed, anew in steps:
        prompt = prompt_of(turns)
        both.tell_ours(prompt, seed)
        both.tell(WRONG, prompt, seed)
        if anew:
            both.snapshot(WRONG)
        for known in (prompt, prompt_of(steps[0][0])):
            truth = both.plain.match(known)
            if len(known) <= 64:
                assert both.matched(known) == truth
            for _ in range(64):
                assert both.matched(known).get(WRONG, 0) >= truth.get(WRONG, 0)
            assert both.matched(known) == truth
    both.table.check()


@pytest.mark.parametrize("storage", ["dict", "arrays"])
def test_a_key_that_leaves_its_child_behind_is_seen_at_once(storage: str) -> None:
    prompt = prompt_of([(1, 40), (2, 40)])
    both = Both(storage, 10**6)
    both.tell_ours(prompt, 0)
    both.apply(OURS, removed([prompt[50], prompt[9]]), stored([prompt[9]], prompt[8]))
    assert both.matched(prompt) == {OURS: 16 * 50}


@pytest.mark.parametrize("storage", ["dict", "arrays"])
def test_a_key_that_comes_without_its_parent_is_seen_at_once(storage: str) -> None:
    prompt = prompt_of([(1, 40), (2, 40)])
    both = Both(storage, 10**6)
    both.tell_ours(prompt[:10], 0)
    both.apply(OURS, stored(prompt[30:], prompt[29]))
    assert both.matched(prompt) == {OURS: 16 * 10}


@pytest.mark.parametrize("storage", ["dict", "arrays"])
def test_what_evicts_leaves_first_is_bisected_whatever_it_stored_and_evicted(storage: str) -> None:
    both = Both(storage, 10**6)
    for n in range(30):
        both.tell_ours(prompt_of([(n % 3, 30), (n, 35)]), n)
        if n == 20:
            both.snapshot(OURS)
    [holdings] = both.table._strides.values()
    walked: list[int] = []
    walk = holdings._walked
    holdings._walked = lambda keys, alive: (walked.append(alive), walk(keys, alive))[1]  # type: ignore[method-assign]
    prompt = prompt_of([(2, 30), (29, 35)])
    assert both.matched(prompt) == both.plain.match(prompt) != {}
    [ours] = [slot for slot in holdings._slots if slot is not None and slot.worker == OURS]
    assert not any(alive & ours.bit for alive in walked)


def test_what_is_only_said_is_still_checked_after_the_storage_has_changed() -> None:
    prompt = prompt_of([(1, 40), (2, 40)])
    both = Both("arrays", 10**6)
    both.table.compact_from = 10**6
    both.apply(WRONG, Snapshot(pack_keys(prompt[:50] + prompt[51:])))
    both.table.compact_from = 60
    both.apply(TOLD, stored([BlockKey(7)], None))
    for _ in range(64):
        both.matched(prompt)
    assert both.matched(prompt) == {WRONG: 16 * 50}


@pytest.mark.parametrize("storage", ["dict", "arrays"])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            TURNS,
            st.sampled_from(("serve", "told", "clear", "snapshot", "quiet")),
            st.sampled_from((None, 0, 64, 9999)),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_what_is_learned_stands_in_place_of_events_until_there_are_some(
    storage: str, steps: list[tuple[list[tuple[int, int]], str, int | None]]
) -> None:
    """Of one worker whose feed comes and goes, while requests are served all the time."""
    worker = LEARNED[0]
    both = Both(storage, 10**6)
    held = both.plain.held[worker]
    attached = True
    prompts: list[list[BlockKey]] = []
    for turns, what, cached in steps:
        prompt = prompt_of(turns)
        prompts.append(prompt)
        if what == "serve":
            both.serve(worker, prompt, None if cached is None else min(cached, 16 * len(prompt)))
        elif what == "quiet":
            contents = both.learner.contents(worker)
            if not attached:
                both.seqs[worker] = 0
            both.table.attach(worker, contents)
            held.clear()
            held.update(key for one in prompts for key in one[: contents.depth(one)])
            attached = True
        else:
            if attached or what != "told":
                held.clear()
            attached = False
            if what == "clear":
                both.apply(worker, CacheCleared())
            elif what == "snapshot":
                held.update(prompt)
                both.apply(worker, Snapshot(pack_keys(sorted(prompt))))
            else:
                depth = both.plain.match(prompt).get(worker, 0) // 16
                held.update(prompt)
                parent = prompt[depth - 1] if depth else None
                both.apply(worker, stored(list(prompt[depth:]), parent))
        for known in prompts:
            assert both.matched(known) == both.plain.match(known)
        assert both.table.blocks(worker) == both.table.entries
    both.table.check()


def test_what_was_learned_counts_for_the_cap_and_goes_the_oldest_first() -> None:
    both = Both("dict", 100)
    old, young, other = prompt_of([(0, 40)]), prompt_of([(1, 40)]), prompt_of([(2, 38)])
    for prompt in (old, young):
        both.serve(LEARNED[2], prompt, None)
    both.serve(LEARNED[1], other, None)
    blocks = [both.table.blocks(worker) for worker in LEARNED]
    assert both.table.entries == sum(blocks) == 100
    assert both.matched(young) == {LEARNED[2]: 640}
    assert both.matched(other) == {LEARNED[1]: 16 * 38}
    assert both.matched(old) == {LEARNED[2]: 16 * 22}


def test_what_was_learned_goes_before_what_many_events_told_only_if_it_is_more() -> None:
    both = Both("dict", 100)
    learned = prompt_of([(0, 20)])
    both.serve(LEARNED[2], learned, None)
    both.apply(TOLD, *(stored(list(prompt_of([(n, 39)])), None) for n in (1, 2)))
    both.apply(TOLD, stored(list(prompt_of([(0, 39)])), None))
    assert both.table.entries <= 100
    assert both.matched(learned)[LEARNED[2]] == 320
