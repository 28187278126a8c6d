"""Bounds and clean-up of the in-process index; the contract is in tests/contracts."""

from __future__ import annotations

import tracemalloc
from random import Random

from gateway.index.table import PrefixTable
from shared.blocks import pack_keys
from shared.events import CacheCleared, CacheEvent, EventBatch, Snapshot, removed, stored
from shared.types import BlockKey, Epoch, WorkerId

E = Epoch(1)


def feed(table: PrefixTable, worker: str, seq: int, *events: CacheEvent) -> None:
    batch = EventBatch(WorkerId(worker), E, "worker", seq, 0.0, 1, events)
    assert table.apply(batch).reason == "applied"


def unique(rng: Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


def test_the_cap_holds_and_shared_blocks_outlive_private_ones() -> None:
    rng = Random(1)
    table = PrefixTable(5_000, Random(2))
    shared = unique(rng, 50)
    for worker in ("a", "b", "c", "d"):
        table.join(WorkerId(worker), E, 1)
        feed(table, worker, 1, stored(shared, None))
    for seq in range(2, 102):
        for worker in ("a", "b", "c", "d"):
            feed(table, worker, seq, stored(unique(rng, 40), None))
            assert table.entries <= 5_000 + 40
    kept = table.match([BlockKey(key) for key in shared])
    assert len(kept) == 4
    assert min(match.tokens for match in kept.values()) == 50 * 16
    table.check()


def test_memory_levels_off_under_churn_and_comes_back() -> None:
    rng = Random(3)
    tracemalloc.start()
    table = PrefixTable(10_000, Random(4))
    for worker in range(4):
        table.join(WorkerId(f"w{worker}"), E, 1)
    held: list[list[int]] = [[] for _ in range(4)]
    sizes: list[int] = []
    for seq in range(1, 101):
        for worker in range(4):
            new = unique(rng, 160)
            old, held[worker] = held[worker][:120], held[worker][120:] + new
            feed(table, f"w{worker}", seq, stored(new, None), removed(old))
        del held[0][: max(0, len(held[0]) - 4000)]
        sizes.append(tracemalloc.get_traced_memory()[0])
    held.clear()
    assert table.entries <= 10_000 + 640
    assert max(sizes[75:]) < 1.25 * max(sizes[50:75])
    before = tracemalloc.get_traced_memory()[0]
    for worker in range(4):
        table.forget(WorkerId(f"w{worker}"))
    while table.tidy(10_000):
        pass
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert table.entries == 0
    assert after < 0.2 * before


def test_giving_up_contents_is_short_work_however_much_there_was() -> None:
    table = PrefixTable(10**6, Random(0))
    table.join(WorkerId("a"), E, 1)
    feed(table, "a", 1, stored(list(range(1, 50_001)), None))
    feed(table, "a", 2, CacheCleared())
    assert table.blocks(WorkerId("a")) == 0
    assert table.tidy(0), "most of the clean-up is still to come"
    feed(table, "a", 3, stored(list(range(1, 101)), None))
    table.check()
    rounds = 0
    while table.tidy(1_000):
        rounds += 1
    assert rounds >= 40
    assert table.blocks(WorkerId("a")) == 100
    table.check()


def test_slots_are_used_again_only_when_swept() -> None:
    table = PrefixTable(10**6, Random(0))
    table.join(WorkerId("a"), E, 1)
    table.join(WorkerId("b"), E, 1)
    common = list(range(1, 5_001))
    feed(table, "a", 1, stored(common, None))
    feed(table, "b", 1, stored(common, None))
    table.forget(WorkerId("a"))
    table.join(WorkerId("c"), E, 1)
    assert set(table.match([BlockKey(1)])) == {"b"}, "c did not inherit what a held"
    while table.tidy(500):
        assert set(table.match([BlockKey(1)])) == {"b"}
    table.join(WorkerId("d"), E, 1)
    assert set(table.match([BlockKey(1)])) == {"b"}
    table.check()


def test_many_snapshots_do_not_pile_up() -> None:
    table = PrefixTable(10**6, Random(0))
    table.join(WorkerId("a"), E, 1)
    for seq in range(1, 301):
        feed(table, "a", seq, Snapshot(pack_keys(range(seq, seq + 500))))
    assert table.blocks(WorkerId("a")) == 500
    assert table.match([BlockKey(300), BlockKey(301)])[WorkerId("a")].tokens == 32
    assert BlockKey(299) not in table.match([BlockKey(299)])
    assert not table.match([BlockKey(299)])
    while table.tidy(10_000):
        pass
    table.check()


def test_a_worker_may_change_its_block_size() -> None:
    table = PrefixTable(10**6, Random(0))
    table.join(WorkerId("a"), E, 1)
    feed(table, "a", 1, stored([1, 2], None))
    table.join(WorkerId("a"), E, 2)
    assert not table.match([BlockKey(1), BlockKey(2)])
    assert table.position(WorkerId("a")) is None
