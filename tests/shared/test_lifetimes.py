"""Ages, idle times and reuses of cached blocks, on a clock that the test turns."""

from __future__ import annotations

from shared.lifetimes import SECONDS, BlockLifetimes, Distribution, Lifetimes
from shared.paging import BlockPool


def store(pool: BlockPool, name: bytes) -> None:
    """Compute and give back one block."""
    (block,) = pool.allocate(1) or []
    pool.release([pool.seal(block, b"R", None, name, None)])


def use(pool: BlockPool, name: bytes) -> None:
    """Find it again and give it back."""
    path = pool.match(b"R", [name])
    assert path
    pool.acquire(path)
    pool.release(path)


def single(values: Distribution) -> float:
    """The value of the only observation."""
    assert values.count == 1
    return values.total


def test_an_evicted_block_tells_its_age_its_idle_time_and_its_uses() -> None:
    pool = BlockPool(1, 16)
    pool.lifetimes.tick(100.0)
    store(pool, b"a")
    pool.lifetimes.tick(103.0)
    use(pool, b"a")
    pool.lifetimes.tick(104.0)
    pool.lifetimes.tick(110.0)
    store(pool, b"b")
    read = pool.lifetimes.read()
    assert (single(read.age_s), single(read.age_steps)) == (10.0, 3)
    assert (single(read.idle_s), single(read.idle_steps)) == (7.0, 2)
    assert (single(read.gap_s), single(read.gap_steps)) == (3.0, 1)
    assert single(read.uses) == 1
    assert read.age_s.mean == 10.0


def test_what_is_not_evicted_is_not_counted_as_such() -> None:
    pool = BlockPool(4, 16)
    for name in (b"a", b"b", b"c"):
        store(pool, name)
    assert pool.lifetimes.read() == BlockPool(4, 16).lifetimes.read()
    assert pool.lifetimes.read().uses.mean is None


def test_blocks_that_were_touched_at_different_times_are_counted_by_their_own() -> None:
    lifetimes = Lifetimes(4)
    lifetimes.tick(0.0)
    for block in range(4):
        lifetimes.born(block)
    lifetimes.tick(1.0)
    lifetimes.found([0, 1])
    lifetimes.tick(3.0)
    lifetimes.found([0, 1, 2, 3])
    gaps = lifetimes.read().gap_s
    assert gaps.count == 6
    assert gaps.total == 2 * 1.0 + 2 * 2.0 + 2 * 3.0
    by_bound = dict(zip(gaps.bounds, gaps.counts, strict=False))
    assert (by_bound[1.0], by_bound[2.0], by_bound[5.0]) == (2, 2, 2)
    assert gaps.bounds == SECONDS


def test_a_block_that_comes_back_from_host_memory_begins_a_new_life() -> None:
    pool = BlockPool(1, 16, host_blocks=1)
    pool.lifetimes.tick(0.0)
    store(pool, b"a")
    pool.lifetimes.tick(5.0)
    store(pool, b"b")
    slots = pool.match_host(b"R", [], [b"a"])
    pool.lifetimes.tick(6.0)
    pool.release(pool.promote(slots, None) or [])
    pool.lifetimes.tick(8.0)
    store(pool, b"c")
    read = pool.lifetimes.read()
    assert (read.age_s.count, read.age_s.total) == (3, 5.0 + 1.0 + 2.0)
    assert (read.uses.count, read.uses.total) == (3, 1)


def test_nothing_observed_is_an_empty_value() -> None:
    empty = BlockLifetimes().age_s
    assert (empty.count, empty.mean) == (0, None)
