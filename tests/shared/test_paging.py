"""The block pool's promises, one by one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from shared.events import BlocksRemoved, BlocksStored, CacheCleared
from shared.paging import BlockPool, spare_blocks
from shared.types import BlockKey

ROOT, OTHER = b"root", b"other"


def units(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def store(
    pool: BlockPool, names: list[bytes], root: bytes = ROOT, first_key: int | None = 100
) -> list[int]:
    """Compute and seal a chain as a sequence would; returns its held blocks."""
    held = pool.match(root, names)
    pool.acquire(held)
    fresh = pool.allocate(len(names) - len(held), after=held[-1] if held else None)
    assert fresh is not None
    held += fresh
    for index in range(len(names) - len(fresh), len(names)):
        key = None if first_key is None else BlockKey(first_key + index)
        parent = held[index - 1] if index else None
        held[index] = pool.seal(held[index], root, parent, names[index], key)
    pool.check()
    return held


def test_a_sealed_path_is_matched_by_its_exact_contents_within_its_scope() -> None:
    pool = BlockPool(8, 4)
    blocks = store(pool, units("a", "b", "c"))
    assert pool.match(ROOT, units("a", "b", "x")) == blocks[:2]
    assert pool.match(ROOT, units("a", "b", "c", "d")) == blocks
    assert pool.match(ROOT, units("b", "c")) == []
    assert pool.match(OTHER, units("a", "b")) == []
    assert pool.match(ROOT, []) == []


def test_a_private_block_is_never_matched() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    assert blocks is not None
    assert pool.match(ROOT, units("a")) == []
    pool.seal(blocks[0], ROOT, None, b"a", None)
    assert pool.match(ROOT, units("a", "b")) == blocks[:1]
    pool.release(blocks)
    pool.check()
    assert (pool.n_free, pool.n_cached) == (3, 1)


def test_released_contents_stay_until_space_is_needed_leaves_first() -> None:
    pool = BlockPool(4, 4)
    blocks = store(pool, units("a", "b", "c"))
    pool.release(blocks)
    assert (pool.n_free, pool.n_cached, pool.n_used, pool.available) == (1, 3, 0, 4)
    taken = pool.allocate(2)
    assert taken is not None
    assert blocks[2] in taken
    assert pool.match(ROOT, units("a", "b", "c")) == blocks[:2]
    assert pool.allocate(2) is not None
    assert pool.match(ROOT, units("a")) == []
    pool.check()


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = BlockPool(6, 4)
    old = store(pool, units("a", "b"))
    new = store(pool, units("a", "c"))
    far = store(pool, units("x", "y"), first_key=200)
    for held in (old, new, far):
        pool.release(held)
    pool.acquire(old)  # used again
    pool.release(old)
    assert pool.n_free == 1
    assert pool.allocate(2) is not None
    assert pool.match(ROOT, units("a", "c")) == old[:1]
    assert pool.allocate(2) is not None
    assert pool.match(ROOT, units("x", "y")) == []
    assert pool.match(ROOT, units("a", "b")) == old
    pool.check()


def test_a_held_child_keeps_its_ancestors() -> None:
    pool = BlockPool(4, 4)
    blocks = store(pool, units("a", "b", "c"))
    again = pool.match(ROOT, units("a", "b"))
    pool.acquire(again)
    pool.release(blocks)
    assert pool.available == 2
    assert pool.allocate(3) is None
    assert pool.allocate(2) is not None
    assert pool.match(ROOT, units("a", "b", "c")) == again


def test_an_allocation_that_fails_changes_nothing() -> None:
    pool = BlockPool(4, 4)
    pool.release(store(pool, units("a", "b")))
    held = pool.allocate(1)
    assert held is not None
    before = pool.drain_events()
    assert before
    assert pool.allocate(4) is None
    assert pool.drain_events() == []
    assert (pool.n_free, pool.n_cached, pool.n_used) == (1, 2, 1)
    assert pool.allocate(0) == []


def test_equal_contents_are_kept_once() -> None:
    pool = BlockPool(8, 4)
    first = store(pool, units("a", "b"))
    mine = pool.allocate(2)
    assert mine is not None
    assert pool.seal(mine[0], ROOT, None, b"a", BlockKey(100)) == first[0]
    assert pool.seal(mine[1], ROOT, first[0], b"b", BlockKey(101)) == first[1]
    assert [pool.refs(block) for block in [*first, *mine]] == [2, 2, 0, 0]
    assert pool.n_used == 2
    pool.release(first)
    assert pool.n_cached == 0
    pool.release(first)
    assert pool.n_cached == 2
    assert [event.keys.tolist() for event in pool.drain_events()] == [[100, 101]]
    pool.check()


def test_the_same_unit_elsewhere_is_another_block() -> None:
    pool = BlockPool(8, 4)
    first = store(pool, units("a", "a", "a"))
    second = store(pool, units("a"), root=OTHER, first_key=300)
    assert len({*first, *second}) == 4


def test_blocks_come_side_by_side_and_grow_in_place() -> None:
    pool = BlockPool(200, 4)
    first = pool.allocate(10)
    second = pool.allocate(10)
    assert first is not None
    assert second is not None
    for held in (first, second):
        for _ in range(16):
            held.extend(pool.allocate(1, after=held[-1]) or [])
        assert held == list(range(held[0], held[0] + 26))
    pool.release(first)
    third = pool.allocate(26)
    assert third is not None
    assert third == list(range(third[0], third[0] + 26))
    pool.check()


def test_an_evicted_chain_is_one_run_again() -> None:
    pool = BlockPool(32, 4)
    for name in "abcd":
        pool.release(store(pool, [f"{name}{index}".encode() for index in range(8)]))
    assert pool.n_free == 0
    taken = pool.allocate(8)
    assert taken == list(range(min(taken or [0]), min(taken or [0]) + 8))


@pytest.mark.parametrize(("spare", "least"), [(0, 1.0), (8, 1.5)])
def test_with_spare_blocks_those_who_grow_side_by_side_keep_neighbours(
    spare: int, least: float
) -> None:
    """Four sequences grow a block each in turn into the place of chains that were evicted."""
    pool = BlockPool(64, 4, spare=spare)
    for name in "abcdefgh":
        pool.release(store(pool, [f"{name}{index}".encode() for index in range(8)]))
    assert pool.n_free == 0
    held = [pool.allocate(1) or [] for _ in range(4)]
    for _ in range(15):
        for blocks in held:
            blocks.extend(pool.allocate(1, after=blocks[-1]) or [])
            pool.check()
    runs = sum(b != a + 1 for blocks in held for a, b in pairwise([-9, *blocks]))
    assert 64 / runs >= least
    assert (runs == 64) == (spare == 0)
    assert pool.allocate(1) is None


def test_no_more_is_evicted_than_is_cached_and_nothing_while_there_is_room() -> None:
    pool = BlockPool(8, 4, spare=3)
    pool.release(store(pool, units("a", "b", "c", "d", "e")))
    assert pool.allocate(3) is not None
    assert pool.n_cached == 5
    assert pool.allocate(1) is not None
    assert (pool.n_cached, pool.n_free) == (1, 3)
    assert pool.match(ROOT, units("a", "b")) == pool.match(ROOT, units("a"))
    assert pool.allocate(4) is not None
    assert (pool.n_cached, pool.n_free) == (0, 0)
    pool.check()


def test_what_is_free_is_found_however_it_is_scattered() -> None:
    rng = random.Random(1)
    pool = BlockPool(500, 4)
    held = [pool.allocate(1) or [] for _ in range(500)]
    rng.shuffle(held)
    for block in held[:300]:
        pool.release(block)
    pool.check()
    taken = pool.allocate(300)
    assert taken is not None
    assert sorted(taken) == sorted(block for blocks in held[:300] for block in blocks)
    assert pool.allocate(1) is None


def test_clear_detaches_what_is_in_use() -> None:
    pool = BlockPool(8, 4)
    used = store(pool, units("a", "b"))
    pool.release(store(pool, units("x", "y"), first_key=200))
    tail = pool.allocate(1, after=used[-1])
    assert tail is not None
    pool.drain_events()
    assert pool.clear() == 2
    pool.check()
    assert pool.match(ROOT, units("a")) == pool.match(ROOT, units("x")) == []
    assert pool.drain_events() == [CacheCleared()]
    assert pool.snapshot_keys() == []
    # The sequence goes on below its detached blocks; nothing of it becomes visible.
    assert pool.seal(tail[0], ROOT, used[-1], b"c", BlockKey(102)) == tail[0]
    assert pool.match(ROOT, units("a", "b", "c")) == []
    # The same contents, computed anew, do.
    anew = store(pool, units("a"))
    assert pool.match(ROOT, units("a", "b")) == anew
    pool.release([*used, *tail])
    assert (pool.n_used, pool.n_cached, pool.n_free) == (1, 0, 7)
    pool.check()


def test_a_detached_block_with_two_holders_is_free_after_both() -> None:
    pool = BlockPool(2, 4)
    blocks = store(pool, units("a"))
    pool.acquire(blocks)
    pool.clear()
    pool.release(blocks)
    pool.check()
    assert pool.n_used == 1
    pool.release(blocks)
    assert pool.n_free == 2
    pool.check()


def test_forgetting_a_block_forgets_all_below_it_and_nothing_else() -> None:
    pool = BlockPool(8, 4)
    held = store(pool, units("a", "b", "c"))
    beside = store(pool, units("a", "d"), first_key=200)
    pool.release(held[2:])
    pool.drain_events()
    free = pool.n_free
    pool.forget(held[1])
    pool.check()
    assert pool.match(ROOT, units("a", "b", "c")) == held[:1]
    assert pool.match(ROOT, units("a", "d")) == beside
    [removed] = pool.drain_events()
    assert isinstance(removed, BlocksRemoved)
    assert list(removed.keys) == [102, 101]
    assert pool.n_free == free + 1, "what nobody held is free"
    pool.forget(held[1])
    pool.check()
    assert pool.drain_events() == [], "it is not in the tree any more"
    pool.release(held[:2])
    pool.release(beside)
    pool.check()
    assert (pool.n_free, pool.n_cached) == (6, 2)


def test_what_of_a_path_nobody_holds_is_counted() -> None:
    pool = BlockPool(8, 4)
    held = store(pool, units("a", "b", "c"))
    assert pool.n_cached_of(held) == 0
    pool.release(held)
    pool.acquire(held[:1])
    assert (pool.n_cached_of(held), pool.n_cached_of(held[:1]), pool.n_cached_of([])) == (2, 0, 0)


def test_the_sizes_that_a_pool_was_made_with() -> None:
    pool = BlockPool(7, 5, spare=2)
    assert (pool.n_blocks, pool.block_size, pool.spare) == (7, 5, 2)
    assert [repr(spare_blocks(size)) for size in (1, 99, 100, 250)] == ["0", "0", "1", "2"]


def test_without_caching_nothing_is_kept() -> None:
    pool = BlockPool(4, 4, caching=False)
    blocks = store(pool, units("a", "b"))
    assert pool.match(ROOT, units("a")) == []
    pool.release(blocks)
    assert (pool.n_free, pool.n_cached) == (4, 0)
    assert pool.drain_events() == []


def test_events_carry_only_keyed_blocks_and_their_keyed_parent() -> None:
    pool = BlockPool(8, 4)
    held = pool.allocate(4)
    assert held is not None
    keys = [None, BlockKey(1), None, BlockKey(2)]
    for index, (name, key) in enumerate(zip(units("a", "b", "c", "d"), keys, strict=True)):
        pool.seal(held[index], ROOT, held[index - 1] if index else None, name, key)
    (event,) = pool.drain_events()
    assert isinstance(event, BlocksStored)
    assert (event.parent, event.keys.tolist()) == (None, [1, 2])
    branch = pool.allocate(1)
    assert branch is not None
    pool.seal(branch[0], ROOT, held[2], b"e", BlockKey(3))
    (event,) = pool.drain_events()
    assert isinstance(event, BlocksStored)
    assert (event.parent, event.keys.tolist()) == (1, [3])


def test_check_notices_a_holder_that_keeps_a_child_without_its_parent() -> None:
    pool = BlockPool(4, 4)
    blocks = store(pool, units("a", "b"))
    pool.release(blocks[:1])
    with pytest.raises(AssertionError, match="is used, its parent not"):
        pool.check()


def test_eviction_is_announced_in_one_event_and_after_what_was_stored() -> None:
    pool = BlockPool(3, 4)
    pool.release(store(pool, units("a", "b", "c")))
    assert pool.allocate(3) is not None
    kinds = [(type(event), sorted(event.keys)) for event in pool.drain_events()]
    assert kinds == [(BlocksStored, [100, 101, 102]), (BlocksRemoved, [100, 101, 102])]


def test_a_key_that_two_blocks_carry_is_announced_once_and_removed_last() -> None:
    pool = BlockPool(2, 4)
    first = store(pool, units("a"), first_key=7)
    second = store(pool, units("b"), first_key=7)
    pool.release(first)
    pool.release(second)
    assert [event.keys.tolist() for event in pool.drain_events()] == [[7]]
    assert pool.allocate(1) is not None
    assert pool.drain_events() == []
    assert pool.snapshot_keys() == [7]
    assert pool.allocate(1) is not None
    assert [event.keys.tolist() for event in pool.drain_events()] == [[7]]


def test_misuse_is_refused() -> None:
    pool = BlockPool(4, 4)
    held = store(pool, units("a"))
    private = pool.allocate(1)
    assert private is not None
    with pytest.raises(ValueError, match="not a private block"):
        pool.seal(held[0], ROOT, None, b"a", None)
    with pytest.raises(ValueError, match="not sealed"):
        pool.acquire(private)
    with pytest.raises(ValueError, match="another scope"):
        pool.seal(private[0], OTHER, held[0], b"b", None)
    pool.release(held)
    with pytest.raises(ValueError, match="not held"):
        pool.release(held)
    with pytest.raises(ValueError, match="is not held"):
        pool.seal(private[0], ROOT, held[0], b"b", None)
    with pytest.raises(ValueError, match="no pool"):
        BlockPool(0, 16)


def test_empty_scopes_leave_no_trace() -> None:
    pool = BlockPool(2, 4)
    for turn in range(50):
        pool.release(store(pool, units("a"), root=str(turn).encode()))
    assert len(pool._tree._roots) <= 2
    assert len(pool._free._largest) <= 100


def test_the_smallest_pool_there_can_be() -> None:
    pool = BlockPool(1, 1)
    [block] = store(pool, units("a"))
    assert pool.match(ROOT, units("a")) == [block]
    assert pool.allocate(1) is None
    for n_blocks, block_size in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="block"):
            BlockPool(n_blocks, block_size)
