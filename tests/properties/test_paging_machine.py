"""The block pool against a model that is too simple to be wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from depth import DEPTH
from enginerig import replay
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shared.events import CacheEvent
from shared.paging import BlockPool
from shared.types import BlockKey

N_BLOCKS = 12

contents = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=7)
roots = st.sampled_from([b"R", b"S"])


@dataclass(eq=False)
class Holder:
    """A sequence: what it holds, and how much of it is visible."""

    root: bytes
    units: list[bytes]
    blocks: list[int]
    sealed: int
    detached: bool = False
    seen: set[int] = field(default_factory=set)


def key_of(root: bytes, path: tuple[bytes, ...]) -> BlockKey | None:
    """Every second depth is announced, as with blocks of 8 tokens."""
    if len(path) % 2:
        return None
    return BlockKey(int.from_bytes(root + b"".join(path), "big"))


class PoolMachine(RuleBasedStateMachine):
    holders = Bundle("holders")
    spare = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(N_BLOCKS, 8, spare=self.spare)
        self.events: list[CacheEvent] = []
        self.live: list[Holder] = []
        self.tree: dict[tuple[bytes, tuple[bytes, ...]], int] = {}
        """The model: every path that is sealed, and its block."""

    def forget_evicted(self, was_cached: int, was_free: int, wanted: int) -> None:
        """After an allocation: as many as needed and spare are gone, never one that is held."""
        gone = {
            (root, path) for root, path in self.tree if len(self.pool.match(root, path)) < len(path)
        }
        evicts = wanted > was_free
        assert len(gone) == evicts * min(wanted - was_free + self.spare, was_cached)
        assert was_cached - self.pool.n_cached == len(gone)
        for root, path in gone:
            del self.tree[root, path]
        held = {block for holder in self.live for block in holder.blocks}
        assert held.isdisjoint(
            block for (root, path), block in self.tree.items() if (root, path) in gone
        )

    @rule(target=holders, root=roots, units=contents)
    def start(self, root: bytes, units: list[bytes]) -> Holder:
        expected: list[int] = []
        for depth in range(1, len(units) + 1):
            block = self.tree.get((root, tuple(units[:depth])))
            if block is None:
                break
            expected.append(block)
        matched = self.pool.match(root, units)
        assert matched == expected
        self.pool.acquire(matched)
        holder = Holder(root, units, list(matched), len(matched))
        self.live.append(holder)
        self.extend(holder, len(units) - len(matched))
        return holder

    def extend(self, holder: Holder, n: int) -> None:
        cached, free = self.pool.n_cached, self.pool.n_free
        in_use = {block for each in self.live for block in each.blocks}
        after = holder.blocks[-1] if holder.blocks else None
        fresh = self.pool.allocate(n, after)
        if fresh is None:
            assert n > cached + free
            assert (self.pool.n_cached, self.pool.n_free) == (cached, free)
            return
        assert len(set(fresh)) == n
        assert in_use.isdisjoint(fresh)
        self.forget_evicted(cached, free, n)
        holder.blocks += fresh

    @rule(holder=holders)
    def grow(self, holder: Holder) -> None:
        if holder in self.live and len(holder.blocks) < len(holder.units):
            self.extend(holder, 1)

    @rule(holder=holders, count=st.integers(1, 7))
    def seal(self, holder: Holder, count: int) -> None:
        if holder not in self.live:
            return
        for index in range(holder.sealed, min(holder.sealed + count, len(holder.blocks))):
            path = tuple(holder.units[: index + 1])
            mine = holder.blocks[index]
            parent = holder.blocks[index - 1] if index else None
            block = self.pool.seal(mine, holder.root, parent, path[-1], key_of(holder.root, path))
            holder.blocks[index] = block
            holder.sealed = index + 1
            if holder.detached and index:
                assert block == mine
            else:
                holder.detached = False
                assert block == self.tree.setdefault((holder.root, path), mine)

    @rule(holder=consumes(holders))
    def release(self, holder: Holder) -> None:
        if holder in self.live:
            self.live.remove(holder)
            self.pool.release(holder.blocks)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.tree.clear()
        for holder in self.live:
            holder.detached = holder.sealed > 0

    @rule(holder=holders, depth=st.integers(0, 6))
    def forget(self, holder: Holder, depth: int) -> None:
        """What is distrusted, and all below it, is found no more; its holders keep theirs."""
        if holder not in self.live or depth >= len(holder.blocks):
            return
        root, path, block = holder.root, tuple(holder.units[: depth + 1]), holder.blocks[depth]
        self.pool.forget(block)
        if self.tree.get((root, path)) != block:
            return  # it was not in the tree
        for known, other in list(self.tree):
            if known == root and other[: depth + 1] == path:
                del self.tree[known, other]
        for each in self.live:
            if each.root == root and tuple(each.units[: depth + 1]) == path:
                each.detached |= each.sealed > depth

    @rule()
    def drain(self) -> None:
        self.events += self.pool.drain_events()
        told = replay(self.events)
        assert told == set(self.pool.snapshot_keys())
        # Whole beginnings of prompts only: gateways bisect for the end of a match.
        for root, path in self.tree:
            if key_of(root, path) in told and len(path) > 2:
                assert key_of(root, path[:-2]) in told

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        references = [0] * N_BLOCKS
        for holder in self.live:
            for block in holder.blocks:
                references[block] += 1
        assert references == [self.pool.refs(block) for block in range(N_BLOCKS)]
        for (root, path), block in self.tree.items():
            assert self.pool.match(root, path)[-1] == block
        keys = {key_of(root, path) for root, path in self.tree} - {None}
        assert keys == set(self.pool.snapshot_keys())


class SparingPoolMachine(PoolMachine):
    """As a worker's pool, which evicts more than it needs."""

    spare = 3


for machine in (PoolMachine, SparingPoolMachine):
    machine.TestCase.settings = settings(
        max_examples=150 * DEPTH, stateful_step_count=40, deadline=None
    )
TestPoolMachine = PoolMachine.TestCase
TestSparingPoolMachine = SparingPoolMachine.TestCase
