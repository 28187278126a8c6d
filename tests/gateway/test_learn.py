"""Workers without cache events: what is learned, forgotten and believed."""

from __future__ import annotations

from random import Random

from routerkit import Rig, ok

from gateway.ghosts import GhostMemory
from gateway.index.table import PrefixTable
from gateway.learn import DEFAULT_CAPACITY_TOKENS, Learner, Served
from gateway.promises import Promises
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
        self.learner.join(W, Epoch(1), stride, capacity)

    def serve(self, prompt: list[BlockKey], cached: int | None, expected: int = 0) -> None:
        served = Served(prompt, len(prompt) * 16 + 1, 0, expected, cached)
        batch = self.learner.served(W, served, 0.0)
        if batch is not None:
            assert self.table.apply(batch).reason == "applied"

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


def test_shortfalls_shrink_the_believed_capacity_and_never_below_zero() -> None:
    world = World()
    assert world.learner.capacity_tokens(W) == DEFAULT_CAPACITY_TOKENS
    prompt = keys(1, 40)
    world.serve(prompt, 0)
    for n in range(20):
        for m in range(5):
            world.serve(keys(10_000 * (n + 1) + 100 * m, 40), 0)
        world.serve(prompt, 0, expected=640)
    assert 0 < world.learner.capacity_tokens(W) < 10_000


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


def test_only_persistent_silence_makes_a_worker_mute() -> None:
    world = World()
    prompt = keys(1, 10)
    for _ in range(31):
        world.serve(prompt, None, expected=160)
    assert not world.learner.mute(W)
    world.serve(prompt, None, expected=160)
    assert world.learner.mute(W)
    world.serve(prompt, 160, expected=160)
    assert not world.learner.mute(W)
    for _ in range(100):
        world.serve(prompt, None, expected=160)
    assert not world.learner.mute(W), "absent means 0 for an engine that does report"


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
