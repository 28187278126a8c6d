"""The exact prefix tree below the block pool: which contents are cached, and on which tier.

A node is one full block, reached from its parent (or a scope's root) by its exact bytes. It is
either on the device (``block``) or in host memory (``slot``), never on both. The parent of a device
node is on the device, so each path is a device part followed by a host part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.types import BlockKey

NOWHERE = -1
"""Place of a node on a tier that does not have it."""


@dataclass(eq=False, slots=True)
class Node:
    """Place of a sealed block in the tree."""

    siblings: dict[bytes, Node]
    """The dict that holds this node: its parent's children or a scope's."""
    root: bytes
    parent: Node | None
    unit: bytes
    key: BlockKey | None
    block: int
    """Device block, or ``NOWHERE``."""
    slot: int = NOWHERE
    """Host slot, or ``NOWHERE``."""
    children: dict[bytes, Node] | None = None
    announced: BlockKey | None = None
    """Key of the nearest block at or above this one that has a key."""

    @property
    def above(self) -> BlockKey | None:
        """Key of the nearest block above this one that has a key."""
        return None if self.parent is None else self.parent.announced

    def family(self) -> list[Node]:
        """This node and all below it, parents before children."""
        nodes = [self]
        for node in nodes:  # grows while it is walked
            nodes.extend((node.children or {}).values())
        return nodes


class PrefixTree:
    """Scopes and their trees. Every operation is O(1) but for iteration."""

    def __init__(self) -> None:
        self._roots: dict[bytes, dict[bytes, Node]] = {}

    def __iter__(self) -> Iterator[Node]:
        """All nodes, parents first."""
        stack = list(self._roots.values())
        while stack:
            for node in stack.pop().values():
                yield node
                if node.children is not None:
                    stack.append(node.children)

    def below(self, root: bytes, parent: Node | None) -> dict[bytes, Node] | None:
        """Children of a node, or the first blocks of a scope; None: there are none."""
        return self._roots.get(root) if parent is None else parent.children

    def add(
        self, root: bytes, parent: Node | None, unit: bytes, key: BlockKey | None, block: int
    ) -> Node:
        """A new device node; ``unit`` is not there yet."""
        siblings = self.below(root, parent)
        if siblings is None:
            siblings = {}
            if parent is None:
                self._roots[root] = siblings
            else:
                parent.children = siblings
        node = Node(siblings, root, parent, unit, key, block)
        node.announced = node.above if key is None else key
        siblings[unit] = node
        return node

    def cut(self, node: Node) -> None:
        """Take a node out, and with it whatever is below."""
        del node.siblings[node.unit]
        if not node.siblings:
            if node.parent is None:
                del self._roots[node.root]
            else:
                node.parent.children = None

    def clear(self) -> None:
        """Forget all."""
        self._roots.clear()

    def check(self) -> None:
        """Raise AssertionError if a node is not where it says it is. O(nodes)."""
        reached: set[int] = set()
        stack: list[tuple[Node | None, bytes, dict[bytes, Node]]] = [
            (None, root, children) for root, children in self._roots.items()
        ]
        while stack:
            parent, root, children = stack.pop()
            if not children:
                raise AssertionError("an empty dict of children")
            for unit, node in children.items():
                if node.siblings is not children or (node.root, node.unit) != (root, unit):
                    raise AssertionError(f"{unit!r} is misplaced")
                if node.parent is not parent or id(node) in reached:
                    raise AssertionError(f"{unit!r} has another parent")
                reached.add(id(node))
                if (node.block == NOWHERE) == (node.slot == NOWHERE):
                    raise AssertionError(f"{unit!r} is on both tiers or on none")
                if node.block != NOWHERE and parent is not None and parent.block == NOWHERE:
                    raise AssertionError(f"{unit!r} is on the device, its parent is not")
                if node.children is not None:
                    stack.append((node, root, node.children))
