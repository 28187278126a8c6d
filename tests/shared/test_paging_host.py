"""The block pool's second tier, promise by promise: what is pushed out is found, and comes back."""

from __future__ import annotations

import pytest

from shared.events import BlocksRemoved, BlocksStored
from shared.hosttier import Copy
from shared.paging import BlockPool
from shared.types import BlockKey, Tier

ROOT = b"root"
ABC = [b"a", b"b", b"c"]


def filled(n_blocks: int, host_blocks: int, units: list[bytes] = ABC) -> BlockPool:
    """A pool in whose cache a chain is that nobody holds, with keys 100, 101, ..."""
    pool = BlockPool(n_blocks, 4, host_blocks=host_blocks)
    held = pool.allocate(len(units)) or []
    for index, unit in enumerate(units):
        parent = held[index - 1] if index else None
        pool.seal(held[index], ROOT, parent, unit, BlockKey(100 + index))
    pool.release(held)
    return pool


def push_out(pool: BlockPool, n: int) -> None:
    """So many blocks are wanted by somebody, for a moment."""
    pool.release(pool.allocate(n) or [])
    pool.check()


def test_what_is_pushed_out_is_found_behind_what_stayed() -> None:
    pool = filled(4, 4)
    push_out(pool, 3)
    path = pool.match(ROOT, ABC)
    assert len(path) == 1
    slots = pool.match_host(ROOT, path, ABC[1:])
    assert len(set(slots)) == 2
    assert pool.match_host(ROOT, path, [b"b", b"x"]) == slots[:1]
    assert pool.match_host(ROOT, path, [b"c"]) == []
    assert pool.match_host(ROOT, path, []) == []
    assert pool.match_host(b"other", [], ABC) == []


def test_a_whole_chain_is_found_and_comes_back_into_the_last_free_blocks() -> None:
    pool = filled(3, 3)
    push_out(pool, 3)
    assert pool.match(ROOT, ABC) == []
    slots = pool.match_host(ROOT, [], ABC)
    assert len(slots) == pool.available == 3
    pool.drain_events()
    pool.host.drain_copies()
    blocks = pool.promote(slots, None)
    assert blocks is not None
    assert pool.match(ROOT, ABC) == blocks
    assert [pool.refs(block) for block in blocks] == [1, 1, 1]
    assert pool.host.drain_copies() == tuple(
        Copy(Tier.HOST, slot, block) for slot, block in zip(slots, blocks, strict=True)
    )
    told = [(type(one), one.tier, sorted(one.keys)) for one in pool.drain_events()]
    keys = [100, 101, 102]
    assert told == [(BlocksStored, Tier.GPU, keys), (BlocksRemoved, Tier.HOST, keys)]
    pool.check()
    pool.release(blocks)
    assert (pool.n_cached, pool.host.n_used) == (3, 0)


def test_what_is_computed_again_takes_the_place_of_its_copy() -> None:
    pool = filled(3, 3)
    push_out(pool, 3)
    pool.drain_events()
    pool.host.drain_copies()
    assert pool.host.n_used == 3
    [block] = pool.allocate(1) or []
    assert pool.seal(block, ROOT, None, b"a", BlockKey(100)) == block
    pool.check()
    assert pool.match(ROOT, ABC) == [block]
    assert (pool.host.n_used, pool.host.drain_copies()) == (2, ())
    told = [(type(e), e.tier, list(e.keys)) for e in pool.drain_events()]
    assert told == [(BlocksStored, Tier.GPU, [100]), (BlocksRemoved, Tier.HOST, [100])]
    assert len(pool.match_host(ROOT, [block], ABC[1:])) == 2


def test_what_lies_below_a_forgotten_block_is_forgotten_on_both_tiers() -> None:
    pool = filled(4, 4)
    push_out(pool, 3)
    assert pool.host.n_used == 2
    pool.forget(pool.match(ROOT, ABC)[0])
    pool.check()
    assert pool.match(ROOT, ABC) == []
    assert pool.match_host(ROOT, [], ABC) == []
    assert (pool.host.n_used, pool.n_free) == (0, 4)


def test_what_comes_back_lies_behind_what_it_continues() -> None:
    pool = filled(8, 4, [b"a", b"b"])
    first = pool.match(ROOT, [b"a"])
    pool.acquire(first)
    push_out(pool, 7)
    assert pool.match(ROOT, [b"a", b"b"]) == first
    assert pool.promote(pool.match_host(ROOT, first, [b"b"]), first[-1]) == [first[-1] + 1]
    pool.check()


def test_too_few_blocks_bring_nothing_back_and_change_nothing() -> None:
    pool = filled(3, 3)
    push_out(pool, 3)
    taken = pool.allocate(1)
    slots = pool.match_host(ROOT, [], ABC)
    pool.drain_events()
    assert pool.promote(slots, None) is None
    assert pool.drain_events() == []
    pool.check()
    assert pool.match_host(ROOT, [], ABC) == slots
    pool.release(taken or [])
    assert pool.promote(slots, None) is not None


def test_nothing_to_bring_back_is_no_block() -> None:
    assert filled(3, 3).promote([], None) == []


def test_only_what_is_there_and_whose_beginning_is_held_comes_back() -> None:
    pool = filled(4, 4)
    push_out(pool, 2)
    path = pool.match(ROOT, ABC)
    slots = pool.match_host(ROOT, path, ABC[2:])
    with pytest.raises(ValueError, match="continues is not held"):
        pool.promote(slots, path[-1])
    free = next(slot for slot in range(4) if slot not in slots)
    with pytest.raises(ValueError, match="no contents"):
        pool.promote([free], None)
    private = pool.allocate(1) or []
    with pytest.raises(ValueError, match="is not sealed"):
        pool.match_host(ROOT, private, ABC)


def test_what_came_back_counts_as_found_again() -> None:
    pool = filled(3, 3)
    push_out(pool, 3)
    pool.promote(pool.match_host(ROOT, [], ABC), None)
    assert pool.lifetimes.read().gap_s.count == 3
