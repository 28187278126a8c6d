"""Memory of what has been encoded and hashed: text pieces to tokens, and chains of pieces to keys.

Two maps, each dropping its least recently used entries beyond its share of the byte budget:

    piece of text (and its salt)       -> Segment: its tokens (whatever stands before it)
    (scope root, piece, piece, ...)    -> ChainNode: keys, chain state and tail up to there

Pieces of different salts are different ones, and so are their chains: who may not know what another
one sends must not find it encoded, which takes a measurable time.

A salt that enters a chain later (``SaltPoint``) is part of what stands for the root here.

A chain node is found under (id of its parent, id of its segment); ids are never used twice, so what
lost its parent cannot be met again and ages out.

Threads: any. A lock guards the maps only; encoding and hashing happen outside of it, on immutable
values. Two threads that compute the same entry at the same time both get a correct one.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from sys import getsizeof
from typing import cast

from shared.blocks import GRANULE_BYTES, SaltPoint, extend_chain
from shared.types import BlockKey

_ENTRY_BYTES = 250
"""About what an entry costs besides its contents (objects, key, dict slot)."""
_PAIR_BYTES = getsizeof(("", ""))
_SEGMENT_SHARE = 0.75

_Name = str | tuple[str, str]
"""A piece of text, with its salt if it has one."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A piece of text as tokens."""

    id: int
    tokens: bytes
    """u32 little endian."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainNode:
    """The chain after one more segment."""

    id: int
    state: bytes
    """Chain state after the last full granule."""
    tail: bytes
    """Tokens after it, fewer than 16."""
    keys: array[int]
    """Keys this segment completed."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the start, and what is held now."""

    hits: int
    misses: int
    segments: int
    nodes: int
    bytes: int


class SegmentCache:
    """See the module's text."""

    def __init__(self, max_bytes: int) -> None:
        self._max_segments = int(max_bytes * _SEGMENT_SHARE)
        self._max_nodes = max_bytes - self._max_segments
        self._segments: OrderedDict[_Name, tuple[Segment, int]] = OrderedDict()
        self._nodes: OrderedDict[tuple[int | bytes, int], tuple[ChainNode, int]] = OrderedDict()
        self._segment_bytes = self._node_bytes = 0
        self._hits = self._misses = 0
        self._ids = count(1)
        self._lock = threading.Lock()

    def known(self, texts: Sequence[str], salt: str = "") -> list[bool]:
        """Which of the pieces are held; changes nothing, not even their age."""
        with self._lock:
            return [name in self._segments for name in _names(texts, salt)]

    def find(self, texts: Sequence[str], salt: str = "") -> list[Segment | None]:
        """The segments held, in order; None where a piece has to be encoded."""
        found: list[Segment | None] = []
        with self._lock:
            for name in _names(texts, salt):
                entry = self._segments.get(name)
                if entry is None:
                    found.append(None)
                else:
                    self._segments.move_to_end(name)
                    found.append(entry[0])
            missing = found.count(None)
            self._misses += missing
            self._hits += len(found) - missing
        return found

    def add(self, text: str, tokens: bytes, salt: str = "") -> Segment:
        """Keep a piece's tokens (packed); returns the segment to go on with."""
        cost = getsizeof(text) + len(tokens) + _ENTRY_BYTES
        if salt:
            cost += getsizeof(salt) + _PAIR_BYTES
        (name,) = _names((text,), salt)
        with self._lock:
            entry = self._segments.get(name)
            if entry is not None:
                return entry[0]
            segment = Segment(next(self._ids), tokens)
            self._segments[name] = (segment, cost)
            self._segment_bytes += cost
            while self._segment_bytes > self._max_segments:
                _, (_, freed) = self._segments.popitem(last=False)
                self._segment_bytes -= freed
        return segment

    def uncached(self, tokens: bytes) -> Segment:
        """A segment that is not kept by its text; its chains are, so make few and keep them."""
        return Segment(next(self._ids), tokens)

    def chain(
        self, root: bytes, segments: Sequence[Segment], salt: SaltPoint | None = None
    ) -> list[BlockKey]:
        """Keys of all full granules of the joined segments, from a scope's root."""
        keys: list[BlockKey] = []
        state, tail = root, b""
        # Chains of one root are different ones if a salt enters them, or enters elsewhere.
        parent: int | bytes = root
        if salt is not None:
            parent = root + salt.mark + salt.tokens.to_bytes(8, "little")
        path = self._walk(parent, segments)
        made: list[tuple[tuple[int | bytes, int], ChainNode]] = []
        for node in path:
            keys.extend(cast("Iterable[BlockKey]", node.keys))
            state, tail, parent = node.state, node.tail, node.id
        for segment in segments[len(path) :]:
            data = tail + segment.tokens
            extras = None if salt is None else salt.extras(len(keys))
            new, state = extend_chain(state, data, extras)
            tail = data[len(new) * GRANULE_BYTES :]
            node = ChainNode(next(self._ids), state, tail, array("Q", new))
            made.append(((parent, segment.id), node))
            keys.extend(new)
            parent = node.id
        if made:
            self._keep(made)
        return keys

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._segments.clear()
            self._nodes.clear()
            self._segment_bytes = self._node_bytes = 0

    def stats(self) -> CacheStats:
        """Counts and sizes."""
        with self._lock:
            held = self._segment_bytes + self._node_bytes
            sizes = (len(self._segments), len(self._nodes), held)
            return CacheStats(self._hits, self._misses, *sizes)

    def _walk(self, parent: int | bytes, segments: Sequence[Segment]) -> list[ChainNode]:
        """The known part of a chain."""
        path: list[ChainNode] = []
        steps: list[tuple[int | bytes, int]] = []
        with self._lock:
            for segment in segments:
                step = (parent, segment.id)
                entry = self._nodes.get(step)
                if entry is None:
                    break
                path.append(entry[0])
                steps.append(step)
                parent = entry[0].id
            # The deepest is touched first, so that of one chain the deepest is dropped first.
            for step in reversed(steps):
                self._nodes.move_to_end(step)
        return path

    def _keep(self, made: Sequence[tuple[tuple[int | bytes, int], ChainNode]]) -> None:
        with self._lock:
            for step, node in reversed(made):
                cost = _ENTRY_BYTES + len(node.tail) + 8 * len(node.keys)
                self._nodes[step] = (node, cost)
                self._node_bytes += cost
            while self._node_bytes > self._max_nodes:
                _, (_, freed) = self._nodes.popitem(last=False)
                self._node_bytes -= freed


def _names(texts: Sequence[str], salt: str) -> Sequence[_Name]:
    return [(salt, text) for text in texts] if salt else texts
