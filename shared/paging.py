"""Ref-counted KV block pool with an exact prefix tree; the worker's real pool and the simulator's.

A block is in exactly one state:

    free       no contents
    private    held by one sequence, which writes it; nobody else can find it
    sealed     its contents are complete and it is a node of the tree; refs >= 1 in use, 0 cached
    detached   was sealed when it was forgotten; its holders go on reading, nobody finds it

A node is reached from its parent (or a scope's root) by the *exact bytes* of the block, so whoever
matches has the same tokens by construction; no hash is trusted. Whoever holds a block holds its
ancestors. Hence a block becomes cached no later than its parent, the cached blocks in the order of
their release (children first) are an LRU order that is leaf-first, and every cached block can be
evicted. All operations are O(blocks named); eviction is O(1) a block.

With a host tier (:mod:`shared.hosttier`) evicted contents move there, and a match may go on from
the device into it; :meth:`BlockPool.promote` brings that part back.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.events import CacheEvent
from shared.freelist import FreeRuns
from shared.hosttier import HostTier
from shared.lifetimes import Lifetimes
from shared.pagingevents import CacheJournal
from shared.pagingproof import PoolState, prove
from shared.prefixtree import NOWHERE, Node, PrefixTree
from shared.types import BlockKey

SPARE_SHARE = 100


def spare_blocks(n_blocks: int) -> int:
    """How many more than needed a worker's pool evicts: a hundredth of it."""
    return n_blocks // SPARE_SHARE


class BlockPool:
    """Blocks ``0 .. n_blocks - 1`` of ``block_size`` tokens. Contents are opaque ``unit`` bytes.

    :param caching: False: nothing is ever sealed or matched.
    :param host_blocks: slots of the host tier; 0 = none.
    :param spare: when cached blocks must be evicted, evict so many more, if there are. They were
        mostly side by side, and so can what comes in their place be; one at a time, each goes to
        whoever grows next, and nobody's blocks are neighbours for long.
    """

    def __init__(
        self,
        n_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        host_blocks: int = 0,
        spare: int = 0,
    ) -> None:
        if n_blocks < 1 or block_size < 1 or spare < 0:
            raise ValueError(f"{n_blocks} blocks of {block_size} tokens, {spare} spare: no pool")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.caching = caching
        self.spare = spare
        self._refs = [0] * n_blocks
        self._nodes: list[Node | None] = [None] * n_blocks
        self._tree = PrefixTree()
        self.host = HostTier(host_blocks, self._tree)
        self.lifetimes = Lifetimes(n_blocks)
        self._detached: set[int] = set()
        self._cached: dict[int, None] = {}  # insertion order = eviction order
        self._free = FreeRuns(n_blocks)
        self._journal = CacheJournal()

    def __repr__(self) -> str:
        return (
            f"BlockPool({self.n_blocks} x {self.block_size}: "
            f"{self.n_used} used, {self.n_cached} cached, {self.n_free} free)"
        )

    @property
    def n_free(self) -> int:
        """Blocks without contents."""
        return len(self._free)

    @property
    def n_cached(self) -> int:
        """Sealed blocks that nobody holds."""
        return len(self._cached)

    @property
    def n_used(self) -> int:
        """Blocks that somebody holds."""
        return self.n_blocks - self.n_free - self.n_cached

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` can give out."""
        return self.n_free + self.n_cached

    def refs(self, block: int) -> int:
        """How many holders a block has."""
        return self._refs[block]

    def match(self, root: bytes, units: Sequence[bytes]) -> list[int]:
        """Longest sealed path from ``root`` whose contents are the first of ``units``.

        Mutates nothing; valid until the next call that mutates, so acquire it at once.
        """
        path: list[int] = []
        children = self._tree.below(root, None)
        for unit in units:
            node = children.get(unit) if children is not None else None
            if node is None or node.block == NOWHERE:
                break
            path.append(node.block)
            children = node.children
        return path

    def match_host(self, root: bytes, path: Sequence[int], units: Sequence[bytes]) -> list[int]:
        """Host slots that continue a matched ``path``; ``units`` are the contents beyond it.

        As :meth:`match`.
        """
        slots: list[int] = []
        children = self._tree.below(root, self._node(path[-1]) if path else None)
        for unit in units:
            node = children.get(unit) if children is not None else None
            if node is None:
                break
            slots.append(node.slot)
            children = node.children
        return slots

    def n_cached_of(self, blocks: Sequence[int]) -> int:
        """How many of a matched path nobody holds; acquiring it makes so many less available."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Take one reference to each block of a matched path, given from the root on."""
        refs = self._refs
        for block in blocks:
            if self._nodes[block] is None:
                raise ValueError(f"block {block} is not sealed")
            if refs[block] == 0:
                del self._cached[block]
            refs[block] += 1
        self.lifetimes.found(blocks)

    def promote(self, slots: Sequence[int], after: int | None) -> list[int] | None:
        """Bring a matched path's host part back, held once by the caller, who holds the rest.

        The contents are there once the pending copies have been executed. ``after`` and None as in
        :meth:`allocate`.
        """
        if len(slots) > self.available:
            return None
        nodes = self.host.pin(slots)
        if nodes and nodes[0].parent is not None and not self._refs[nodes[0].parent.block]:
            raise ValueError(f"what host slot {slots[0]} continues is not held")
        blocks = self.allocate(len(slots), after) or []
        for node, block in zip(nodes, blocks, strict=True):
            self.host.bring_back(node, block)
            self._show(node)
            self.lifetimes.found((block,))
        return blocks

    def allocate(self, n: int, after: int | None = None) -> list[int] | None:
        """``n`` private blocks, physically consecutive and following ``after`` where possible.

        Free blocks first, then the least recently used cached ones, of which ``spare`` more become
        free. None if ``available < n``; nothing has changed then.
        """
        if n > self.available:
            return None
        if len(self._free) < n:
            wanted = min(n + self.spare, self.available)
            while len(self._free) < wanted:
                self._evict()
        blocks = self._free.take(n, after, self._refs)
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def seal(
        self, block: int, root: bytes, parent: int | None, unit: bytes, key: BlockKey | None
    ) -> int:
        """Make a computed private block visible under ``parent`` (None: first block of ``root``).

        :param unit: exact contents.
        :param key: index key that announces the block in events; None announces nothing.
        :returns: the block that now holds these contents for the caller. If an equal one was there,
            that is it, with a reference taken, and ``block`` has been freed. Without caching, or if
            ``parent`` is not in the tree (the cache was cleared), ``block`` stays private.
        """
        if self._refs[block] != 1 or self._nodes[block] is not None:
            raise ValueError(f"block {block} is not a private block")
        parent_node = None if parent is None else self._nodes[parent]
        if not self.caching or (parent is not None and parent_node is None):
            return block
        if parent is not None and self._refs[parent] == 0:
            raise ValueError(f"parent {parent} of block {block} is not held")
        if parent_node is not None and parent_node.root != root:
            raise ValueError(f"parent {parent} of block {block} belongs to another scope")
        siblings = self._tree.below(root, parent_node)
        twin = None if siblings is None else siblings.get(unit)
        if twin is None:
            self._show(self._tree.add(root, parent_node, unit, key, block))
        elif twin.block == NOWHERE:
            self.host.replace(twin, block)
            self._show(twin)
        else:
            self.acquire((twin.block,))
            self._refs[block] = 0
            self._free.put(block)
            return twin.block
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of a sequence's blocks, given from the root on.

        Sealed blocks without holders stay reusable, all others are free.
        """
        refs = self._refs
        for block in reversed(blocks):
            if refs[block] < 1:
                raise ValueError(f"block {block} is not held")
            refs[block] -= 1
            if refs[block]:
                continue
            if self._nodes[block] is not None:
                self._cached[block] = None
                self.lifetimes.idle(block)
            else:
                self._detached.discard(block)
                self._free.put(block)

    def clear(self) -> int:
        """Forget all contents on both tiers; blocks in use are detached.

        Returns how many blocks became free.
        """
        freed = len(self._cached)
        for block, node in enumerate(self._nodes):
            if node is None:
                continue
            self._nodes[block] = None
            if self._refs[block]:
                self._detached.add(block)
            else:
                self._free.put(block)
        self._cached.clear()
        self._tree.clear()
        self._journal.cleared()
        self.host.clear()
        return freed

    def forget(self, block: int) -> None:
        """Make a block and all below it unfindable, because its contents cannot be trusted.

        Holders keep theirs until they release them; what nobody holds is free. Nothing happens to a
        block that is not in the tree.
        """
        top = self._nodes[block]
        if top is None:
            return
        self._tree.cut(top)
        for node in reversed(top.family()):
            if node.block == NOWHERE:
                self.host.give_up(node)
                continue
            self._nodes[node.block] = None
            if node.key is not None:
                self._journal.removed(node.key)
            if self._refs[node.block]:
                self._detached.add(node.block)
            else:
                del self._cached[node.block]
                self._free.put(node.block)

    def drain_events(self) -> list[CacheEvent]:
        """What happened to announced blocks since the last call, in order."""
        return self._journal.drain() + self.host.journal.drain()

    def snapshot_keys(self) -> list[int]:
        """Keys of all sealed device blocks that have one: what the events so far add up to."""
        return self._journal.keys()

    def _node(self, block: int) -> Node:
        node = self._nodes[block]
        if node is None:
            raise ValueError(f"block {block} is not sealed")
        return node

    def _show(self, node: Node) -> None:
        """A node has come to the device."""
        self._nodes[node.block] = node
        self.lifetimes.born(node.block)
        if node.key is not None:
            self._journal.stored(node.key, node.above)

    def _evict(self) -> None:
        """Free the least recently used cached block: it has no device children (see above)."""
        block = next(iter(self._cached))
        del self._cached[block]
        node = self._node(block)
        self._nodes[block] = None
        if not self.host.admit(node):
            self.host.drop_below(node)
            self._tree.cut(node)
        if node.key is not None:
            self._journal.removed(node.key)
        self.lifetimes.evicted(block)
        self._free.put(block)

    def check(self) -> None:
        """Prove the invariants; raises AssertionError. O(pool)."""
        prove(
            PoolState(
                refs=self._refs,
                nodes=self._nodes,
                free=list(self._free),
                cached=list(self._cached),
                detached=self._detached,
                tree=self._tree,
                keys=self.snapshot_keys(),
            )
        )
        self._free.check()
        self.host.check()
