"""What an emulated engine keeps: a prefix cache over a block pool, or llama.cpp's slots."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.blocks import pack_tokens, usable_tokens
from shared.events import BlocksRemoved, BlocksStored, CacheCleared
from shared.paging import BlockPool
from shared.types import BlockKey

_LOW64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class CacheNews:
    """One thing that happened to an engine's blocks, in terms that every event form can carry."""

    kind: str
    """``stored``, ``removed`` or ``cleared``."""
    ids: tuple[int, ...] = ()
    """Unsigned."""
    parent: int | None = None
    tokens: tuple[int, ...] = ()
    salt: str = ""
    """Of the first block, if it begins a chain."""


@dataclass(slots=True, eq=False)
class Held:
    """What a running request holds."""

    prompt: list[int]
    salt: str
    cached: int
    """Prompt tokens that were there."""
    blocks: list[int] = field(default_factory=list)
    matched: int = 0
    """Blocks that were there."""
    slot: int = 0


class Cache(Protocol):
    """Contents of one engine."""

    def begin(self, prompt: list[int], room: int, salt: str) -> Held | None:
        """Take what is cached and room for an answer; None: there is no room now."""
        ...

    def computed(self, held: Held, tokens: Sequence[int]) -> None:
        """KV of these tokens (prompt, then answer) is there."""
        ...

    def end(self, held: Held) -> None:
        """Give everything back; what is complete stays."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...

    def news(self) -> list[CacheNews]:
        """What happened since the last call."""
        ...

    @property
    def used_tokens(self) -> int:
        """Held by running requests."""
        ...

    @property
    def total_tokens(self) -> int:
        """Room in all."""
        ...


class PagedCache:
    """Blocks in a pool, named by chained SHA-256 as engines do. ``seed`` differs per process."""

    def __init__(self, n_blocks: int, block_size: int, seed: bytes) -> None:
        self.pool = BlockPool(n_blocks, block_size)
        self._size, self._seed = block_size, seed
        self._known: dict[int, tuple[tuple[int, ...], str]] = {}

    def begin(self, prompt: list[int], room: int, salt: str) -> Held | None:
        """See :class:`Cache`."""
        pool, size = self.pool, self._size
        root = self._seed + salt.encode()
        usable = usable_tokens(len(prompt), len(prompt), size)
        path = pool.match(root, self._units(prompt[:usable]))
        pool.acquire(path)
        more = pool.allocate(
            -(-(len(prompt) + room) // size) - len(path), path[-1] if path else None
        )
        if more is None:
            pool.release(path)
            return None
        return Held(prompt, salt, len(path) * size, path + more, len(path))

    def recall(self, held: Held) -> list[CacheNews]:
        """The blocks that a request reuses, as if they were stored now."""
        tokens = held.prompt[: held.cached]
        ids = tuple(self._names(tokens, held.salt))
        return [CacheNews("stored", ids, None, tuple(tokens), held.salt)] if ids else []

    def _names(self, tokens: Sequence[int], salt: str) -> Iterator[int]:
        digest = hashlib.sha256(self._seed + salt.encode()).digest()
        for unit in self._units(tokens):
            digest = hashlib.sha256(digest + unit).digest()
            yield int.from_bytes(digest[:8], "big")

    def computed(self, held: Held, tokens: Sequence[int]) -> None:
        """See :class:`Cache`."""
        root = self._seed + held.salt.encode()
        names = self._names(tokens, held.salt)
        for index, (name, unit) in enumerate(zip(names, self._units(tokens), strict=True)):
            if index < held.matched:
                continue
            first = index * self._size
            self._known[name] = (tuple(tokens[first : first + self._size]), held.salt)
            parent = held.blocks[index - 1] if index else None
            held.blocks[index] = self.pool.seal(
                held.blocks[index], root, parent, unit, BlockKey(name)
            )
            held.matched = index + 1

    def end(self, held: Held) -> None:
        """See :class:`Cache`."""
        self.pool.release(held.blocks)

    def clear(self) -> None:
        """See :class:`Cache`."""
        self.pool.clear()

    def news(self) -> list[CacheNews]:
        """See :class:`Cache`."""
        told = []
        for event in self.pool.drain_events():
            if isinstance(event, BlocksStored):
                ids = tuple(event.keys)
                known = [self._known[one] for one in ids]
                tokens = tuple(token for block, _ in known for token in block)
                salt = known[0][1] if event.parent is None else ""
                told.append(CacheNews("stored", ids, event.parent, tokens, salt))
            elif isinstance(event, BlocksRemoved):
                ids = tuple(event.keys)
                for one in ids:
                    self._known.pop(one, None)
                told.append(CacheNews("removed", ids))
            elif isinstance(event, CacheCleared):
                self._known.clear()
                told.append(CacheNews("cleared"))
        return told

    @property
    def used_tokens(self) -> int:
        """See :class:`Cache`."""
        return self.pool.n_used * self._size

    @property
    def total_tokens(self) -> int:
        """See :class:`Cache`."""
        return self.pool.n_blocks * self._size

    def _units(self, tokens: Sequence[int]) -> list[bytes]:
        data, width = pack_tokens(tokens), self._size * 4
        return [data[at : at + width] for at in range(0, len(data) - width + 1, width)]


class SlotCache:
    """llama.cpp: each slot keeps the last sequence that it served."""

    SIMILAR = 0.1
    """A slot that shares this part of a prompt is taken; else the one unused for longest."""

    def __init__(self, slots: int, context: int) -> None:
        self._context = context
        self.slots: list[list[int]] = [[] for _ in range(slots)]
        self.busy: dict[int, Held] = {}
        self._order = list(range(slots))

    def begin(self, prompt: list[int], room: int, salt: str) -> Held | None:
        """See :class:`Cache`. Salts are not understood."""
        free = [slot for slot in self._order if slot not in self.busy]
        if not free or len(prompt) + room > self._context:
            return None
        common = {slot: _common(self.slots[slot], prompt) for slot in free}
        best = max(free, key=lambda slot: common[slot])
        slot = best if common[best] > self.SIMILAR * len(prompt) else free[0]
        held = Held(prompt, salt, min(common[slot], len(prompt) - 1), slot=slot)
        self.busy[slot] = held
        self._order.remove(slot)
        self._order.append(slot)
        return held

    def computed(self, held: Held, tokens: Sequence[int]) -> None:
        """See :class:`Cache`."""
        self.slots[held.slot] = list(tokens)

    def end(self, held: Held) -> None:
        """See :class:`Cache`."""
        self.busy.pop(held.slot, None)

    def clear(self) -> None:
        """See :class:`Cache`."""
        self.slots = [[] for _ in self.slots]

    def news(self) -> list[CacheNews]:
        """Nothing is told."""
        return []

    @property
    def used_tokens(self) -> int:
        """See :class:`Cache`."""
        return sum(len(held.prompt) for held in self.busy.values())

    @property
    def total_tokens(self) -> int:
        """See :class:`Cache`."""
        return self._context * len(self.slots)


def _common(kept: Sequence[int], prompt: Sequence[int]) -> int:
    """Length of the common prefix."""
    for at, (mine, theirs) in enumerate(zip(kept, prompt, strict=False)):
        if mine != theirs:
            return at
    return min(len(kept), len(prompt))


def signed(name: int) -> int:
    """An unsigned 64-bit name as a signed one."""
    return name - (1 << 64) if name >> 63 else name & _LOW64
