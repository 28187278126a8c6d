"""The block pool with a host tier, against real memory: whoever reads a block finds its contents.

Steps are taken as an engine takes them: places are handed out (plan), then the pending copies are
executed and the new blocks written (run), then they are sealed (commit). Sequences may be aborted
and the cache may be cleared at any moment between.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash
from depth import DEPTH
from enginerig import replay
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.events import CacheEvent
from shared.hosttier import Copy, in_batches
from shared.paging import BlockPool
from shared.prefixtree import NOWHERE, Node
from shared.types import BlockKey, Tier

N_BLOCKS = 9

contents = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=6)
roots = st.sampled_from([b"R", b"S"])
picks = st.integers(0, 20)
rarely = st.sampled_from([False] * 11 + [True])
"""Whether a step is taken that empties things: often taken, nothing would ever come back from the
host tier."""

Memory = dict[tuple[Tier, int], bytes]


@dataclass(eq=False)
class Holder:
    """A sequence: its blocks, how many of them are written, and how many are visible."""

    root: bytes
    units: list[bytes]
    blocks: list[int]
    written: int
    sealed: int

    def contents(self, index: int) -> bytes:
        return self.root + b"".join(self.units[: index + 1])


def key_of(contents: bytes) -> BlockKey | None:
    """Every second depth is announced, as with blocks of 8 tokens."""
    return BlockKey(xxhash.xxh3_64_intdigest(contents)) if len(contents) % 2 else None


def copied(memory: Memory, copies: tuple[Copy, ...] | list[Copy]) -> Memory:
    """Memory after some copies; each batch reads before it writes."""
    memory = dict(memory)
    for source, reads, writes in in_batches(copies):
        target = Tier.HOST if source is Tier.GPU else Tier.GPU
        found = [memory.get((source, place), b"?") for place in reads]
        memory.update({(target, place): what for place, what in zip(writes, found, strict=True)})
    return memory


def whole(node: Node) -> bytes:
    """What a node's block must contain."""
    above = node.root if node.parent is None else whole(node.parent)
    return above + node.unit


class HostTierMachine(RuleBasedStateMachine):
    n_slots = 5

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(N_BLOCKS, 8, host_blocks=self.n_slots)
        self.memory: Memory = {}
        self.events: list[CacheEvent] = []
        self.live: list[Holder] = []

    def nodes(self) -> dict[bytes, Node]:
        return {whole(node): node for node in self.pool._tree}

    def count_lost(self, before: dict[bytes, Node], evicted: int, free_slots: int) -> None:
        """What the device evicts is lost only for want of slots."""
        lost = before.keys() - self.nodes().keys()
        room = free_slots if self.pool.host.is_open else 0
        assert len(lost) == max(0, evicted - room)

    def allocate(self, n: int, after: int | None) -> list[int] | None:
        before, slots = self.nodes(), self.n_slots - self.pool.host.n_used
        evicted = n - self.pool.n_free
        fresh = self.pool.allocate(n, after)
        if fresh is not None:
            self.count_lost(before, max(0, evicted), slots)
        return fresh

    @rule(root=roots, units=contents)
    def start(self, root: bytes, units: list[bytes]) -> None:
        before, host = self.nodes(), self.pool.host
        free_slots = self.n_slots - host.n_used
        path = self.pool.match(root, units)
        slots = self.pool.match_host(root, path, units[len(path) :])
        known = 0
        while root + b"".join(units[: known + 1]) in before and known < len(units):
            known += 1
        assert len(path) + len(slots) == known
        fresh = len(units) - len(path)
        if fresh > self.pool.available - self.pool.n_cached_of(path):
            return
        self.pool.acquire(path)
        evicted = max(0, len(slots) - self.pool.n_free)
        loaded = self.pool.promote(slots, path[-1] if path else None)
        assert loaded is not None
        self.count_lost(before, evicted, free_slots)
        held = path + loaded
        assert self.pool.match(root, units)[: len(held)] == held
        rest = self.allocate(len(units) - len(held), held[-1] if held else None)
        assert rest is not None
        self.live.append(Holder(root, units, held + rest, len(held), len(held)))

    @rule(prompts=st.lists(st.tuples(roots, contents), min_size=2, max_size=12))
    def serve(self, prompts: list[tuple[bytes, list[bytes]]]) -> None:
        """One after the other, each from its start to its end: what makes the cache fill, spill
        over and be asked again."""
        for root, units in prompts:
            running = len(self.live)
            self.start(root, units)
            self.run()
            self.commit()
            while len(self.live) > running:
                self.release(running)

    @rule(which=picks, unit=st.sampled_from([b"a", b"b"]))
    def grow(self, which: int, unit: bytes) -> None:
        if not self.live:
            return
        holder = self.live[which % len(self.live)]
        fresh = self.allocate(1, holder.blocks[-1])
        if fresh is not None:
            holder.blocks += fresh
            holder.units = [*holder.units, unit]

    @rule()
    def run(self) -> None:
        self.memory = copied(self.memory, self.pool.host.drain_copies())
        for holder in self.live:
            for index in range(holder.written):
                assert self.memory[Tier.GPU, holder.blocks[index]] == holder.contents(index)
            for index in range(holder.written, len(holder.blocks)):
                self.memory[Tier.GPU, holder.blocks[index]] = holder.contents(index)
            holder.written = len(holder.blocks)

    @rule()
    def commit(self) -> None:
        for holder in self.live:
            for index in range(holder.sealed, holder.written):
                parent = holder.blocks[index - 1] if index else None
                unit, key = holder.units[index], key_of(holder.contents(index))
                holder.blocks[index] = self.pool.seal(
                    holder.blocks[index], holder.root, parent, unit, key
                )
            holder.sealed = max(holder.sealed, holder.written)

    @rule(which=picks)
    def release(self, which: int) -> None:
        if self.live:
            self.pool.release(self.live.pop(which % len(self.live)).blocks)

    @rule(which=picks, depth=picks, really=rarely)
    def forget(self, which: int, depth: int, really: bool) -> None:
        """Contents turn out to be worthless, with all that was computed from them."""
        if not self.live or not really:
            return
        holder = self.live[which % len(self.live)]
        index = depth % len(holder.blocks)
        before = self.nodes()
        bad = next((n for n in before.values() if n.block == holder.blocks[index]), None)
        self.pool.forget(holder.blocks[index])
        lost = before.keys() - self.nodes().keys()
        prefix = None if bad is None else holder.contents(index)
        assert lost == {each for each in before if prefix and each.startswith(prefix)}

    @rule(really=rarely)
    def clear(self, really: bool) -> None:
        if not really:
            return
        self.pool.clear()
        assert self.pool.host.n_used == self.pool.n_cached == 0
        assert not self.nodes()

    @precondition(lambda self: self.n_slots)
    @rule(close=rarely)
    def open_or_close(self, close: bool) -> None:
        """Whoever counts on what is here learns that a closed tier holds nothing."""
        open_ = not close
        self.pool.host.switch(open_)
        assert self.pool.host.n_used == 0 or open_

    @rule()
    def drain(self) -> None:
        self.events += self.pool.drain_events()
        assert replay(self.events) == set(self.pool.snapshot_keys())
        assert replay(self.events, Tier.HOST) == set(self.pool.host.journal.keys())

    @invariant()
    def every_block_has_or_gets_its_contents(self) -> None:
        self.pool.check()
        memory = copied(self.memory, self.pool.host._copies)
        for expected, node in self.nodes().items():
            place = (Tier.HOST, node.slot) if node.block == NOWHERE else (Tier.GPU, node.block)
            assert memory[place] == expected
        references = [0] * N_BLOCKS
        for holder in self.live:
            for index, block in enumerate(holder.blocks):
                references[block] += 1
                if index < holder.written:
                    assert memory[Tier.GPU, block] == holder.contents(index)
        assert references == [self.pool.refs(block) for block in range(N_BLOCKS)]

    def teardown(self) -> None:
        """Nothing leaks: when all have left, every block can be had."""
        while self.live:
            self.release(0)
        assert self.pool.available == N_BLOCKS
        self.pool.clear()
        assert (self.pool.n_free, self.pool.host.n_used) == (N_BLOCKS, 0)
        self.drain()
        self.pool.check()


class TinyHostMachine(HostTierMachine):
    """So few slots that whatever is brought back competes with what is pushed out."""

    n_slots = 1


for machine in (HostTierMachine, TinyHostMachine):
    machine.TestCase.settings = settings(
        max_examples=100 * DEPTH, stateful_step_count=40, deadline=None
    )
TestHostTier = HostTierMachine.TestCase
TestTinyHostTier = TinyHostMachine.TestCase
