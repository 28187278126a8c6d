"""Keys in the order of their last use, and how much was used since each: LRU stack distances.

A cache of ``n`` blocks that evicts what was used longest ago holds exactly the keys at a distance
below ``n``, whatever was hit and whatever was inserted in between.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_SIZE = 256


@dataclass(slots=True, eq=False)
class _Use:
    """The keys that were used last by one and the same prompt."""

    number: int
    """Larger is later."""
    place: int
    """In the tree."""
    keys: int = 0


class Recency:
    """A set of keys with an order. ``touch`` is O(keys), ``distance`` is O(log uses).

    :param clock: of the last use before.
    """

    def __init__(self, clock: int = 0) -> None:
        self._keys: OrderedDict[int, _Use] = OrderedDict()
        """Oldest first; of one use, leaves before their ancestors."""
        self._uses: list[_Use] = []
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
        use = self._new_use()
        known, left = self._keys, Counter[_Use]()
        new = []
        for key in reversed(keys):
            before = known.get(key)
            if before is None:
                new.append(key)
            else:
                left[before] += 1
            known[key] = use
            known.move_to_end(key)
        for _ in range(unnamed):
            self._unnamed -= 1
            known[self._unnamed] = use
        for before, count in left.items():
            self._count(before, -count)
        self._count(use, len(set(keys)) + unnamed)
        new.reverse()
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
        gone = []
        while len(self._keys) > most:
            gone.append(self._pop())
        return [key for key in gone if key >= 0]

    def drop_before(self, key: int) -> list[int]:
        """Take out all that was used last before ``key`` was; returns them, unnamed ones aside."""
        limit = self._keys[key].number
        gone = []
        while next(iter(self._keys.values())).number < limit:
            gone.append(self._pop())
        return [one for one in gone if one >= 0]

    def drop(self, key: int) -> None:
        """Take one key out. Unknown ones are fine."""
        use = self._keys.pop(key, None)
        if use is not None:
            self._count(use, -1)

    def clear(self) -> list[int]:
        """Take all out; returns them, unnamed ones aside."""
        return self.keep(0)

    def _pop(self) -> int:
        key, use = self._keys.popitem(last=False)
        self._count(use, -1)
        return key

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
        self._tree = [0] * (max(_FIRST_SIZE, 2 * len(self._uses)) + 1)
        for place, use in enumerate(self._uses):
            use.place = place
            self._add(place, use.keys)

    def _count(self, use: _Use, change: int) -> None:
        use.keys += change
        self._add(use.place, change)

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
