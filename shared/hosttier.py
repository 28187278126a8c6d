"""Host memory as a second tier below the block pool: what the device evicts moves here.

Invariants, beside those of :mod:`shared.prefixtree`:

- Contents *move*: a node has a device block or a host slot, never both. Contents never change.
- The pool evicts leaf-first, so a node comes here after all its descendants have, and whatever goes
  back goes with its ancestors. Hence the slots in the order of their arrival are an LRU order that
  is leaf-first here as well, and the oldest slot has nobody below it.
- While a path is brought back its slots are out of that order (*pinned*): making room for it on the
  device sends others here, and they must not push it out.
- Every move leaves a :class:`Copy`. Whoever runs the model executes them in their order, after the
  computation of earlier steps and before that of the next: so contents are read before their place
  is overwritten, and are there before they are read, although places are used anew at once.

With no slots, or while it is closed, nothing is here and evicted contents are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shared.pagingevents import NetJournal
from shared.prefixtree import NOWHERE, Node, PrefixTree
from shared.types import Tier


class Copy(NamedTuple):
    """One block's contents from the tier ``source`` to the other one."""

    source: Tier
    src: int
    """Device block if ``source`` is the device, else host slot."""
    dst: int


class HostTier:
    """Slots ``0 .. n_slots - 1``, each as large as a device block. All operations are O(1) a slot.

    :param tree: the pool's; nodes that are dropped here are cut out of it.
    """

    def __init__(self, n_slots: int, tree: PrefixTree) -> None:
        if n_slots < 0:
            raise ValueError(f"{n_slots} host slots")
        self.n_slots = n_slots
        self._open = True
        self.journal = NetJournal(Tier.HOST)
        self.n_dropped = 0
        """Contents that had to make room for others since the start."""
        self._tree = tree
        self._nodes: list[Node | None] = [None] * n_slots
        self._lru: dict[int, None] = {}  # insertion order = order in which contents are dropped
        self._free = list(range(n_slots - 1, -1, -1))
        self._copies: list[Copy] = []

    @property
    def is_open(self) -> bool:
        """Whether blocks may move here."""
        return self._open

    def switch(self, open_: bool) -> None:
        """Open or close the tier. Closing forgets its contents: receivers of events must not count
        on what nobody will load. O(slots) then, else O(1)."""
        self._open = open_
        while not open_ and self._lru:
            self._drop_oldest()

    @property
    def n_used(self) -> int:
        """Slots with contents."""
        return self.n_slots - len(self._free)

    def admit(self, node: Node) -> bool:
        """Move a node here from its device block; False, and no change, if that cannot be."""
        if not self._open or not (self._free or self._lru):
            return False
        if not self._free:
            self._drop_oldest()
            self.n_dropped += 1
        slot = self._free.pop()
        self._copies.append(Copy(Tier.GPU, node.block, slot))
        self._nodes[slot] = node
        self._lru[slot] = None
        node.block, node.slot = NOWHERE, slot
        if node.key is not None:
            self.journal.stored(node.key)
        return True

    def pin(self, slots: Sequence[int]) -> list[Node]:
        """Nodes of a path that is about to be brought back; nothing pushes them out."""
        nodes: list[Node] = []
        for slot in slots:
            node = self._nodes[slot]
            if node is None or slot not in self._lru:
                raise ValueError(f"host slot {slot} has no contents to bring back")
            del self._lru[slot]
            nodes.append(node)
        return nodes

    def bring_back(self, node: Node, block: int) -> None:
        """Move a pinned node to a device block."""
        self._copies.append(Copy(Tier.HOST, node.slot, block))
        self.give_up(node)
        node.block = block

    def replace(self, node: Node, block: int) -> None:
        """A device block got the same contents by computing them: no copy is needed."""
        self.give_up(node)
        node.block = block

    def _drop_oldest(self) -> None:
        oldest = self._nodes[next(iter(self._lru))]
        assert oldest is not None
        self.give_up(oldest)
        self._tree.cut(oldest)

    def give_up(self, node: Node) -> None:
        """Free a node's slot. If that was its only place, its caller cuts it out of the tree."""
        slot = node.slot
        self._lru.pop(slot, None)
        self._nodes[slot] = None
        self._free.append(slot)
        node.slot = NOWHERE
        if node.key is not None:
            self.journal.removed(node.key)

    def drop_below(self, node: Node) -> None:
        """Forget all descendants of a node that is about to be cut. O(those)."""
        for lost in node.family()[1:]:
            self.give_up(lost)

    def clear(self) -> None:
        """Forget all contents. Copies that are pending stay: held device blocks may need them."""
        for slot, node in enumerate(self._nodes):
            if node is not None:
                self._nodes[slot] = None
                self._free.append(slot)
        self._lru.clear()
        self.journal.cleared()

    def drain_copies(self) -> tuple[Copy, ...]:
        """Copies since the last call, in the order in which they must be executed."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def check(self) -> None:
        """Prove the invariants; raises AssertionError. O(slots + nodes)."""
        if not set(self._free).isdisjoint(self._lru) or len(set(self._free)) != len(self._free):
            raise AssertionError("a host slot is free twice, or free and in use")
        if len(self._free) + len(self._lru) != self.n_slots:
            raise AssertionError("a host slot is lost, or still pinned")
        order = {slot: place for place, slot in enumerate(self._lru)}
        here = [node for node in self._tree if node.slot != NOWHERE]
        if {node.slot for node in here} != set(self._lru) or len(here) != len(self._lru):
            raise AssertionError("host slots and tree differ")
        for node in here:
            if self._nodes[node.slot] is not node:
                raise AssertionError(f"host slot {node.slot} belongs to another node")
            above = NOWHERE if node.parent is None else node.parent.slot
            if above != NOWHERE and order[above] < order[node.slot]:
                raise AssertionError(f"host slot {above} goes before its child")
        if sorted({node.key for node in here if node.key is not None}) != sorted(
            self.journal.keys()
        ):
            raise AssertionError("host keys and tree differ")


def in_batches(copies: Sequence[Copy]) -> Iterator[tuple[Tier, list[int], list[int]]]:
    """``(source, places to read, places to write)``: copies that may be executed all at once.

    A batch goes one way and writes no place twice, so neither can its order matter.
    """
    source = Tier.GPU
    reads: list[int] = []
    writes: dict[int, None] = {}
    for copy in copies:
        if reads and (copy.source is not source or copy.dst in writes):
            yield source, reads, list(writes)
            reads, writes = [], {}
        source = copy.source
        reads.append(copy.src)
        writes[copy.dst] = None
    if reads:
        yield source, reads, list(writes)
