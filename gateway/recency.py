"""Keys in the order of their last use, and how much was used since each: LRU stack distances.

A cache of ``n`` blocks that evicts what was used longest ago holds exactly the keys at a distance
below ``n``, whatever was hit and whatever was inserted in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

_FIRST_SIZE = 256
_STALE = 16
"""Keys that a use may list beyond twice those it still has."""


@dataclass(slots=True, eq=False)
class _Use:
    """The keys that were used last by one and the same prompt."""

    number: int
    """Larger is later."""
    place: int
    """In the tree."""
    keys: int = 0
    order: list[int] = field(default_factory=list)
    """Leaves before their ancestors; those that belong to a later use by now are still listed."""


class Recency:
    """A set of keys with an order. ``touch`` is O(keys), ``distance`` is O(log uses).

    Work per key is left to dictionaries as a whole; only work per use is done step by step.

    :param clock: of the last use before.
    """

    def __init__(self, clock: int = 0) -> None:
        self._keys: dict[int, _Use] = {}
        self._uses: list[_Use] = []
        """By number."""
        self._oldest = 0
        """No use before this place has keys."""
        self._tree = [0] * (_FIRST_SIZE + 1)
        """Fenwick tree over ``_uses``: how many keys each still has."""
        self._unnamed = 0
        self.clock = clock
        """Number of the last use."""

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def touch(self, keys: Sequence[int], unnamed: int = 0) -> list[int]:
        """A prompt's keys were used, first to last; returns those that were not there.

        :param unnamed: so many further blocks, whose keys nobody will ask for (an answer's).
        """
        use, known = self._new_use(), self._keys
        distinct = dict.fromkeys(keys, use)
        before: Counter[_Use | None] = Counter()
        new = list(distinct)
        if not known.keys().isdisjoint(distinct):
            before.update(map(known.get, distinct))
            new = [key for key in distinct if key not in known] if before.pop(None, 0) else []
        known.update(distinct)
        nameless = range(self._unnamed - unnamed, self._unnamed)
        known.update(dict.fromkeys(nameless, use))
        self._unnamed -= unnamed
        use.order = [*reversed(distinct), *reversed(nameless)]
        for earlier, count in before.items():
            assert earlier is not None
            self._count(earlier, -count)
        self._count(use, len(use.order))
        return new

    def distance(self, key: int) -> int | None:
        """How many other keys were used after it; None: it is not there. Pure."""
        use = self._keys.get(key)
        return None if use is None else len(self._keys) - self._up_to(use.place)

    def used(self, key: int) -> int | None:
        """``clock`` at its last use; None: it is not there. Pure."""
        use = self._keys.get(key)
        return None if use is None else use.number

    def keep(self, most: int) -> list[int]:
        """Take out the oldest keys beyond ``most``; returns them, unnamed ones aside."""
        gone: list[int] = []
        while len(self._keys) > most:
            gone += self._take(self._first(), len(self._keys) - most)
        return [key for key in gone if key >= 0]

    def drop_before(self, key: int) -> list[int]:
        """Take out all that was used last before ``key`` was; returns them, unnamed ones aside."""
        limit = self._keys[key]
        gone: list[int] = []
        while (use := self._first()) is not limit:
            gone += self._take(use, use.keys)
        return [one for one in gone if one >= 0]

    def drop(self, keys: Collection[int]) -> None:
        """Take keys out. Unknown ones are fine."""
        if self._keys.keys().isdisjoint(keys):
            return
        left = Counter(use for key in keys if (use := self._keys.pop(key, None)) is not None)
        for use, count in left.items():
            self._count(use, -count)

    def clear(self) -> list[int]:
        """Take all out; returns them, unnamed ones aside."""
        return self.keep(0)

    def _first(self) -> _Use:
        """The oldest use that still has keys; there must be one."""
        while not self._uses[self._oldest].keys:
            self._oldest += 1
        return self._uses[self._oldest]

    def _take(self, use: _Use, most: int) -> list[int]:
        """Take the first ``most`` keys of a use out."""
        order = use.order if len(use.order) == use.keys else self._own(use, use.order)
        gone = order[:most]
        for key in gone:
            del self._keys[key]
        use.order = order[most:]
        self._count(use, -len(gone))
        return gone

    def _own(self, use: _Use, keys: Iterable[int]) -> list[int]:
        known = self._keys
        return [key for key in keys if known.get(key) is use]

    # ---------------------------------------------------------------- the tree of counts

    def _new_use(self) -> _Use:
        if len(self._uses) == len(self._tree) - 1:
            self._rebuild()
        self.clock += 1
        use = _Use(self.clock, len(self._uses))
        self._uses.append(use)
        return use

    def _rebuild(self) -> None:
        """Uses without keys go; the tree gets twice the room that the others need."""
        self._uses = [use for use in self._uses if use.keys]
        self._oldest = 0
        self._tree = [0] * (max(_FIRST_SIZE, 2 * len(self._uses)) + 1)
        for place, use in enumerate(self._uses):
            use.place = place
            self._add(place, use.keys)

    def _count(self, use: _Use, change: int) -> None:
        use.keys += change
        self._add(use.place, change)
        if len(use.order) > 2 * use.keys + _STALE:
            use.order = self._own(use, use.order)

    def _add(self, place: int, change: int) -> None:
        at = place + 1
        while at < len(self._tree):
            self._tree[at] += change
            at += at & -at

    def _up_to(self, place: int) -> int:
        total, at = 0, place + 1
        while at:
            total += self._tree[at]
            at -= at & -at
        return total
