"""Workers without cache events: what is learned, forgotten and believed."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routerkit import Rig, ok

from gateway.ghosts import GhostMemory
from gateway.index.table import PrefixTable
from gateway.learn import DEFAULT_CAPACITY_TOKENS, Learner, Served
from gateway.promises import Promise, Promises
from gateway.recency import Recency
from gateway.routing.base import Trust
from shared.events import Snapshot, stored
from shared.types import BlockKey, Epoch, WorkerId

W = WorkerId("w")


def keys(start: int, count: int) -> list[BlockKey]:
    return [BlockKey(value) for value in range(start, start + count)]


class World:
    """A learner and the index it feeds."""

    def __init__(self, capacity: int = 0, stride: int = 1) -> None:
        self.learner = Learner()
        self.table = PrefixTable(10**6, Random(0))
        self.table.join(W, Epoch(1), stride)
        self.learner.join(W, stride, capacity)
        self.table.attach(W, self.learner.contents(W))

    def serve(
        self, prompt: list[BlockKey], cached: int | None, expected: int = 0, **fields: int | None
    ) -> None:
        fields = {"clock": self.learner.clock(W)} | fields
        served = Served(prompt, len(prompt) * 16 + 1, 0, expected, cached, **fields)
        change = self.learner.served(W, served)
        if change is not None:
            self.table.learn(W, change)

    def held(self, prompt: list[BlockKey]) -> int:
        match = self.table.match(prompt).get(W)
        return 0 if match is None else match.tokens


def test_a_served_prompt_is_there_until_the_capacity_is_used_up() -> None:
    world = World(capacity=1600)
    first = keys(1, 40)
    world.serve(first, 0)
    assert world.held(first) == 640
    for n in range(10):
        world.serve(keys(1000 + 50 * n, 20), 0)
    assert world.held(first) == 0
    assert world.table.blocks(W) <= 100


def test_use_keeps_a_prefix_and_leaves_go_first() -> None:
    world = World(capacity=1600)
    shared = keys(1, 20)
    for n in range(30):
        world.serve(shared + keys(1000 + 50 * n, 20), 320 if n else 0, 320 if n else 0)
    assert world.held(shared) == 320
    tail = keys(1, 80)
    world.serve(tail, 0)
    world.serve(keys(5000, 30), 0)
    assert 0 < world.held(tail) < 80 * 16, "its end is forgotten before its beginning"


class LruWorker:
    """Blocks of 16 tokens, the one used longest ago goes first; ``step``: it counts in these."""

    def __init__(self, blocks: int, step: int = 16, least: int = 0) -> None:
        self.blocks, self.step, self.least = blocks, step, least
        self.cache: dict[int, None] = {}

    def ask(self, prompt: list[BlockKey]) -> int:
        hit = next((n for n, key in enumerate(prompt) if key not in self.cache), len(prompt)) * 16
        for key in reversed(prompt):
            self.cache.pop(key, None)
            self.cache[key] = None
        while len(self.cache) > self.blocks:
            del self.cache[next(iter(self.cache))]
        return hit // self.step * self.step if hit >= self.least else 0


def live(world: World, worker: LruWorker, rng: Random, rounds: int, families: int = 60) -> int:
    """Serve prompts of some families; returns the tokens predicted wrongly in the last half."""
    wrong = 0
    for n in range(rounds):
        # Few families are asked for often, many seldom.
        family = int(families * rng.random() ** 2)
        prompt = keys(1_000 * family, 20) + keys(10**6 + 100 * n, 4)
        expected = world.held(prompt)
        cached = worker.ask(prompt)
        if n >= rounds // 2:
            wrong += abs(expected - cached)
        world.serve(prompt, cached, expected)
    return wrong


@pytest.mark.parametrize("blocks", [150, 400, 1500])
@pytest.mark.parametrize("told", [0, 160_000])
def test_the_capacity_is_learned_from_what_is_delivered(blocks: int, told: int) -> None:
    world, worker = World(capacity=told), LruWorker(blocks)
    wrong = live(world, worker, Random(blocks), 600)
    assert wrong < 0.08 * 300 * 320
    assert world.learner.capacity_tokens(W) < 1.4 * blocks * 16 or blocks == 1500


def test_a_cache_that_has_grown_is_noticed() -> None:
    world, rng = World(), Random(5)
    small = LruWorker(150)
    live(world, small, rng, 400)
    before = world.learner.capacity_tokens(W)
    small.blocks = 1200
    live(world, small, rng, 800)
    assert before < 4_000 < world.learner.capacity_tokens(W)


def test_one_lost_block_is_no_small_cache() -> None:
    world, prompt = World(), keys(1, 40)
    world.serve(prompt, 0)
    for n in range(50):
        world.serve(keys(10_000 + 100 * n, 40), 0)
        world.serve(prompt, 640, expected=640)
    world.serve(keys(50_000, 40), 0)
    world.serve(prompt, 320, expected=640)
    assert world.learner.capacity_tokens(W) > 100_000


def test_what_was_used_before_a_missing_block_is_gone_too() -> None:
    world = World()
    old, middle, young = keys(1, 10), keys(100, 10), keys(200, 10)
    for prompt in (old, middle, young):
        world.serve(prompt, 0)
    world.serve(middle, 80, expected=160)
    assert (world.held(old), world.held(middle), world.held(young)) == (0, 160, 160)


def test_a_restarted_engine_is_noticed_after_three_empty_answers() -> None:
    world, prompts = World(), [keys(100 * n, 10) for n in range(1, 20)]
    for prompt in prompts:
        world.serve(prompt, 0)
    believed = world.learner.capacity_tokens(W)
    for prompt in prompts[-3:]:
        world.serve(prompt, 0, expected=160)
    assert [world.held(prompt) for prompt in prompts[:-1]] == [0] * 18
    assert world.held(prompts[-1]) == 160, "that one it has computed anew"
    assert world.learner.capacity_tokens(W) == believed, "a restart says nothing about the size"


def test_a_sibling_under_way_is_no_evidence() -> None:
    world, prompt = World(), keys(1, 10)
    world.serve(prompt, 0)
    clock = world.learner.clock(W)
    world.serve(keys(500, 10), 0)
    world.serve(prompt, 160, expected=160)
    # It was sent before the one above was answered, and its blocks were used again meanwhile.
    world.serve(prompt, 0, expected=160, clock=clock)
    world.serve(prompt, 0, expected=160, clock=None)
    assert world.held(keys(500, 10)) == 160


def test_a_worker_that_counts_in_steps_loses_nothing_by_it() -> None:
    world, worker = World(), LruWorker(10**6, step=128, least=1024)
    long, short = keys(1, 100), keys(1000, 40)
    for _ in range(20):
        for prompt in (long, short):
            world.serve(prompt, worker.ask(prompt), world.held(prompt))
    assert (world.held(long), world.held(short)) == (1600, 640)
    assert world.learner.capacity_tokens(W) == DEFAULT_CAPACITY_TOKENS


class LruList:
    """What :class:`Recency` says, block by block."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        """Block -> number of its last use, the oldest first; unnamed ones are below 0."""
        self.watched: dict[int, int] = {}
        self.uses = 0

    def touch(self, prompt: list[int], unnamed: int) -> list[int]:
        self.uses += 1
        new = [key for key in prompt if key not in self.held]
        for key in reversed(prompt):
            self.held.pop(key, None)
            self.watched.pop(key, None)
            self.held[key] = self.uses
        for n in range(unnamed):
            self.held[-10 * self.uses - n] = self.uses
        return new

    def keep(self, most: int, watch: int) -> list[int]:
        gone = list(self.held)[: max(0, len(self.held) - most)]
        named = [key for key in gone if key >= 0]
        for key in gone:
            use = self.held.pop(key)
            if key >= 0:
                self.watched[key] = use
        for key in list(self.watched)[: max(0, len(self.watched) - watch)]:
            del self.watched[key]
        return named

    def drop_before(self, key: int) -> list[int]:
        limit = self.held[key]
        gone = [one for one, use in self.held.items() if use < limit]
        self.held = {one: use for one, use in self.held.items() if use >= limit}
        self.watched = {one: use for one, use in self.watched.items() if use >= limit}
        return [one for one in gone if one >= 0]

    def distance(self, key: int) -> int | None:
        both = {**self.watched, **self.held}
        return sum(use > both[key] for use in both.values()) if key in both else None

    def depth(self, prompt: list[int]) -> int:
        return next((at for at, key in enumerate(prompt) if key not in self.held), len(prompt))

    def last_but(self, prompt: list[int], clock: int) -> int | None:
        places = [at for at, key in enumerate(prompt) if self.held.get(key, clock) <= clock]
        return places[-1] if places else None


PIECES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from((1, 5, 16, 40))), max_size=4)
"""A prompt: pieces by kind and length."""
PATHS = st.lists(st.integers(0, 1), max_size=7)
"""Prompts are paths in a tree, and a key is the number of a node in it."""


def path_keys(turns: list[int]) -> list[int]:
    return [int("1" + "".join(map(str, turns[: n + 1])), 2) for n in range(len(turns))]


def path_to(key: int) -> list[int]:
    """The prompt that ends with this key."""
    return path_keys([int(turn) for turn in f"{key:b}"[1:]])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("touch"), PATHS, st.integers(0, 2)),
            st.tuples(st.just("keep"), st.integers(0, 24), st.integers(0, 8)),
            st.tuples(st.just("drop_before"), PATHS, st.just(0)),
        ),
        max_size=60,
    )
)
def test_recency_is_an_lru_list(steps: list[tuple[str, Any, int]]) -> None:
    recency, model = Recency(), LruList()
    for what, value, further in steps:
        if what == "touch":
            prompt = path_keys(value)
            assert recency.touch(prompt, further) == model.touch(prompt, further)
        elif what == "keep":
            assert list(recency.keep(value, further)) == model.keep(value, further)
        elif value and (prompt := path_keys(value))[-1] in model.held:
            last = len(prompt) - 1
            assert list(recency.drop_before(prompt, last)) == model.drop_before(prompt[-1])
        assert (len(recency), recency.watched) == (len(model.held), len(model.watched))
        assert recency.entries == sum(key >= 0 for key in model.held)
        for key in range(2, 256):
            prompt = path_to(key)
            for at in range(len(prompt)):
                assert recency.distance(prompt, at) == model.distance(prompt[at])
                assert recency.used(prompt, at) == model.held.get(prompt[at])
            assert recency.depth(prompt) == model.depth(prompt)
            for clock in (model.uses - 1, further):
                assert recency.last_but(prompt, clock) == model.last_but(prompt, clock)


def test_recency_is_exact_over_many_uses() -> None:
    recency, rng = Recency(), Random(3)
    for n in range(3000):
        last = [rng.randrange(50), 1000 + n]
        recency.touch(last)
        recency.keep(200)
    recency.touch([7])
    assert recency.distance([7], 0) == 0
    assert recency.distance(last, 1) == 1


def test_a_worker_told_capacity_bounds_the_belief() -> None:
    world = World()
    world.learner.resize(W, 4096)
    assert world.learner.capacity_tokens(W) == 4096
    world.learner.resize(W, 0)
    assert world.learner.capacity_tokens(W) == 4096


def test_larger_blocks_are_learned_at_their_stride() -> None:
    world = World(stride=2)
    prompt = keys(1, 5)
    world.serve(prompt, 0)
    assert world.table.blocks(W) == 2
    assert world.held(prompt) == 64


def test_affinity_without_any_event() -> None:
    rig = Rig(events=False)
    prompts = [rig.prompt(30) for _ in range(20)]
    home = [rig.serve(prompt, 0).worker for prompt in prompts]
    assert len(set(home)) > 1
    rig.now += 30
    for prompt, worker in zip(prompts, home, strict=True):
        record = rig.serve(prompt + rig.prompt(1), 480)
        assert (record.worker, record.trust) == (worker, "learned")
        assert record.flow.captured == record.flow.delivered == 480


def test_trust_follows_the_feed() -> None:
    rig = Rig(workers=0)
    rig.join("w1")

    def trust() -> Trust:
        return rig.router.workers(rig.now)[0].trust

    assert trust() is Trust.LEARNED
    assert rig.feed("w1", Snapshot(b"")) == "applied"
    assert trust() is Trust.LEARNED, "one batch does not say that none is missing"
    rig.router.set_trust(WorkerId("w1"), Trust.EXACT, "events flow", rig.now)
    assert trust() is Trust.EXACT
    rig.seqs["w1"] += 1
    assert rig.feed("w1", stored([1], None)) == "gap"
    assert trust() is Trust.LEARNED
    assert rig.feed("w1", Snapshot(b"")) == "applied"
    assert trust() is Trust.LEARNED
    rig.router.set_trust(W, Trust.BLIND, "no such worker", rig.now)
    rig.router.set_trust(WorkerId("w1"), Trust.BLIND, "other tokens", rig.now)
    keys_ = rig.prompt(10)
    rig.warm("w1", keys_)
    assert trust() is Trust.BLIND
    assert rig.route(keys_).matched_tokens == 0
    rig.router.set_trust(WorkerId("w1"), Trust.LEARNED, "feed lost", rig.now)
    assert rig.route(keys_).matched_tokens == 160
    rig.join("w1", epoch=2)
    assert trust() is Trust.LEARNED
    assert rig.route(keys_).matched_tokens == 0


def test_a_worker_without_prefix_cache_is_blind_and_balanced_by_load() -> None:
    rig = Rig(workers=0)
    for name in ("w1", "w2"):
        rig.join(name, prefix_cache=False, event_feed=False)
    prompt = rig.prompt(30)
    rig.serve(prompt, None)
    route = rig.route(prompt)
    assert route.overlap.available_tokens == 0
    assert {item.trust for item in rig.router.workers(rig.now)} == {Trust.BLIND}
    leases = [rig.begin(prompt) for _ in range(10)]
    assert {lease.worker for lease in leases} == {"w1", "w2"}
    for lease in leases:
        lease.finish(ok(481, None), rig.now)


def test_ghosts_remember_prefixes_within_bounds() -> None:
    ghosts = GhostMemory(1000)
    prompt = keys(1, 100)
    ghosts.remember(prompt)
    assert ghosts.seen(prompt + keys(900, 5)) == 100
    assert ghosts.seen(prompt[:30]) == 30
    assert ghosts.seen(keys(500, 10)) == 0
    for n in range(50):
        ghosts.remember(keys(10_000 + 200 * n, 100))
        assert len(ghosts) <= 1000
    assert ghosts.seen(prompt) == 0
    ghosts.remember(keys(1, 5000))
    assert 0 < ghosts.seen(keys(1, 5000)) <= 1000
    assert len(ghosts) <= 1000


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("make"), PIECES, st.integers(0, 90)),
            st.tuples(st.sampled_from(("break", "keep")), st.integers(0, 9), st.integers(0, 9)),
        ),
        max_size=40,
    )
)
def test_promises_say_what_a_walk_over_them_says(steps: list[tuple[str, Any, int]]) -> None:
    promises = Promises(linger_s=2.0)
    made: list[Promise] = []
    until: dict[Promise, float] = {}
    """Those that count, and how long."""
    prompts: list[list[BlockKey]] = []
    for now, (what, value, number) in enumerate(steps):
        if what == "make":
            prompt = [
                BlockKey(key) for piece in range(len(value)) for key in piece_of(value, piece)
            ]
            prompts.append(prompt)
            made.append(promises.make(W, prompt, min(number, len(prompt)), now))
            until[made[-1]] = inf
        elif value < len(made):
            promise = made[value]
            if what == "break":
                promises.break_off(promise)
                until.pop(promise, None)
            elif until.get(promise) == inf:
                promises.keep(promise, now)
                until[promise] = now + 2.0
        promises.expire(now)
        until = {promise: end for promise, end in until.items() if end > now}
        for prompt in prompts:
            for indexed in {0, number, len(prompt) // 2, max(0, len(prompt) - 1)}:
                ends = [agreed(promise, prompt, indexed) for promise in until]
                assert promises.extend(W, prompt, indexed) == max([indexed, *ends])


def piece_of(pieces: list[tuple[int, int]], number: int) -> list[int]:
    """Keys of a piece of a prompt: they stand for all that comes before them."""
    before = hash(tuple(pieces[:number]))
    kind, length = pieces[number]
    return [hash((before, kind, at)) for at in range(length)]


def agreed(promise: Promise, prompt: list[BlockKey], indexed: int) -> int:
    """Up to where a promise that covers ``indexed`` is the same as a prompt; else 0."""
    same = 0
    for mine, key in zip(promise.keys, prompt, strict=False):
        if mine != key:
            break
        same += 1
    return same if promise.start <= indexed < same else 0


def test_promises_are_counted_per_attempt() -> None:
    promises = Promises(linger_s=1.0)
    prompt = keys(1, 10)
    one = promises.make(W, prompt, 4, 0.0)
    two = promises.make(W, prompt[:8], 4, 0.0)
    assert promises.extend(W, prompt, 4) == 10
    assert promises.extend(W, prompt, 0) == 0, "what is below was indexed then and is not now"
    assert promises.extend(WorkerId("other"), prompt, 4) == 4
    promises.break_off(one)
    promises.break_off(one)
    assert promises.extend(W, prompt, 4) == 8
    promises.keep(two, 5.0)
    promises.make(W, keys(100, 1), 0, 5.5)
    assert promises.extend(W, prompt, 4) == 8
    promises.make(W, keys(100, 1), 0, 6.5)
    assert promises.extend(W, prompt, 4) == 4
    promises.forget(W)
    promises.break_off(two)
    assert not promises.workers()


def test_a_kept_promise_ends_in_time_even_where_nothing_else_happens() -> None:
    rig = Rig(workers=1)
    keys_ = rig.prompt(10)
    rig.serve(keys_, 0)
    assert rig.route(keys_).matched_tokens == 160, "its events are on their way"
    rig.now += 1.5
    assert rig.route(keys_).matched_tokens == 0


def test_a_promise_is_no_knowledge_where_contents_are_learned() -> None:
    """They are known as soon as the answer is: a flush must not be outlived by a promise."""
    rig = Rig(workers=1, events=False)
    keys_ = rig.prompt(10)
    rig.serve(keys_, 0)
    assert rig.route(keys_).matched_tokens == 160
    rig.router.flush(WorkerId("w1"), rig.now)
    assert rig.route(keys_).matched_tokens == 0


def test_a_cache_too_small_for_all_that_is_asked_is_no_restart() -> None:
    world = World()
    prompts = [keys(100 * n, 28) for n in range(1, 13)]
    for _ in range(6):
        for prompt in prompts:
            world.serve(prompt, 0, expected=world.held(prompt))
    assert world.learner.capacity_tokens(W) < 12 * 28 * 16
    assert world.held(prompts[0]) == 0
