"""The proof that a block pool's parts agree, for tests and checked runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from shared.prefixtree import NOWHERE, Node, PrefixTree


class PoolState(NamedTuple):
    """What a :class:`shared.paging.BlockPool` consists of."""

    refs: Sequence[int]
    """Holders of each block."""
    nodes: Sequence[Node | None]
    """What each block is in the tree."""
    free: Sequence[int]
    cached: Sequence[int]
    """In the order of eviction."""
    detached: Collection[int]
    tree: PrefixTree
    keys: Sequence[int]
    """As announced in events."""


def prove(state: PoolState) -> None:
    """Raise AssertionError unless the invariants hold. O(pool)."""
    free, cached = set(state.free), set(state.cached)
    used = {block for block, refs in enumerate(state.refs) if refs}
    _require(not free & cached and not free & used and not cached & used, "a block in two sets")
    _require(len(free) == len(state.free), "a block twice in the free list")
    _require(free | cached | used == set(range(len(state.refs))), "a block in no set")
    sealed = {block for block, node in enumerate(state.nodes) if node is not None}
    _require(cached <= sealed, "a cached block that is not sealed")
    _require(sealed <= cached | used, "a free block in the tree")
    detached = set(state.detached)
    _require(detached <= used - sealed, "a detached block that is sealed or unused")
    for block in used - sealed - detached:
        _require(state.refs[block] == 1, f"writable block {block} has two holders")
    _prove_tree(state, sealed)


def _prove_tree(state: PoolState, sealed: set[int]) -> None:
    state.tree.check()
    order = {block: place for place, block in enumerate(state.cached)}
    here = [node for node in state.tree if node.block != NOWHERE]
    for node in here:
        block, parent = node.block, node.parent
        _require(state.nodes[block] is node, f"block {block} belongs to another node")
        if parent is None:
            continue
        if block not in order:
            _require(state.refs[parent.block] > 0, f"block {block} is used, its parent not")
        if parent.block in order:
            _require(order[block] < order[parent.block], f"block {block} outlives its parent")
    _require({node.block for node in here} == sealed, "a sealed block outside the tree")
    keys = {node.key for node in here if node.key is not None}
    _require(sorted(keys) == sorted(state.keys), "keys and tree differ")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
