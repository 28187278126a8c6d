"""Blocks in the order of their last use, and how much was used since each: LRU stack distances.

A cache of ``n`` blocks that evicts what was used longest ago holds exactly the keys at a distance
below ``n``, whatever was hit and whatever was inserted in between.

    oldest  [ .. watched .. | .............. held .............. ]  newest

Keys come as prompts, and a key stands for all that comes before it: whoever uses a key uses those
before it as well. So what is known is closed under taking prefixes, along a prompt the last uses
never rise, and the blocks that were used last by one prompt are a slice of its keys:

    use = prompt[lo:mid] held, prompt[mid:hi] watched      lo rises when others use the beginning,
                                                           mid and hi fall when its end gets too old

Ends of slices are found by bisection, and a prompt that goes on where its last turn ended keeps its
use: only what is new, and what others used in between, is touched key by key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

_FIRST_SIZE = 256


@dataclass(slots=True, eq=False)
class _Use:
    """The blocks that were used last by one and the same prompt."""

    number: int
    """Larger is later."""
    place: int
    """In the tree."""
    path: Sequence[int] = ()
    """The prompt's keys from ``base`` on; indices below count from its beginning."""
    base: int = 0
    lo: int = 0
    mid: int = 0
    hi: int = 0
    unnamed: int = 0
    """Further blocks, held while any of them is, whose keys nobody will ask for."""

    @property
    def held(self) -> int:
        return self.mid - self.lo + self.unnamed

    @property
    def blocks(self) -> int:
        return self.hi - self.lo + self.unnamed

    def part(self, first: int, last: int) -> Sequence[int]:
        return self.path[first - self.base : last - self.base]

    def trim(self) -> None:
        """Let go of keys that it has lost, once they are most of what it lists."""
        if self.hi - self.lo < len(self.path) // 2:
            self.path, self.base = self.part(self.lo, self.hi), self.lo


class Recency:
    """Held and watched blocks of one worker.

    :param clock: of the last use before.
    """

    def __init__(self, clock: int = 0) -> None:
        self._known: dict[int, _Use] = {}
        self._uses: list[_Use] = []
        """By number."""
        self._edge = self._oldest = 0
        """No use before these places has blocks that are held, or watched."""
        self._tree = [0] * (_FIRST_SIZE + 1)
        """Fenwick tree over ``_uses``: how many blocks each still has."""
        self._held = self.watched = 0
        """``watched``: blocks that are not held any more, but known."""
        self.clock = clock
        """Number of the last use."""

    def __len__(self) -> int:
        return self._held

    def touch(self, keys: Sequence[int], unnamed: int = 0) -> Sequence[int]:
        """A prompt's keys were used, first to last; returns those that were not held.

        :param unnamed: so many further blocks, whose keys nobody will ask for (an answer's).
        """
        if len(self._uses) == len(self._tree) - 1:
            self._rebuild()
        runs = self._runs(keys)
        size, known = len(keys), runs[-1][1] if runs else 0
        held: int | None = None
        kept, begin, stop = None, 0, 0  # the longest slice that is whole
        for first, end, use in runs:
            if held is None and use.mid < end:
                held = max(first, use.mid)
            if first == use.lo and end == use.hi and end - first > stop - begin:
                kept, begin, stop = use, first, end
        for first, end, use in runs:
            self._lose(use, first, end)
        use = self._renewed(kept)
        use.path, use.base, use.lo, use.mid, use.hi = keys, 0, 0, size, size
        use.unnamed = unnamed
        if stop - begin < size:
            for part in (keys[:begin], keys[stop:]):
                deque(map(self._known.__setitem__, part, repeat(use)), maxlen=0)
        self._held += size + unnamed
        self._add(use.place, size + unnamed)
        return keys[known if held is None else held :]

    def distance(self, key: int) -> int | None:
        """How many blocks were used after it; None: it is not known. Pure."""
        use = self._known.get(key)
        if use is None:
            return None
        return self._held + self.watched - self._up_to(use.place)

    def used(self, key: int) -> int | None:
        """``clock`` at its last use; None: it is not held. Pure."""
        use = self._known.get(key)
        if use is None or not self._holds(use, key):
            return None
        return use.number

    def keep(self, most: int, watch: int = 0) -> list[int]:
        """Hold the newest ``most`` blocks and watch at most ``watch`` of the others; returns the
        keys that are not held any more, the oldest first."""
        gone: list[int] = []
        while self._held > most:
            use = self._first(self._edge)
            gone += self._let_go(use, self._held - most)
        while self.watched > watch:
            self._forget(self.watched - watch)
        return gone

    def drop_before(self, key: int) -> list[int]:
        """Forget all that was used last before ``key``, which is held, was; returns what of it was
        held, the oldest first."""
        limit = self._known[key].number
        gone: list[int] = []
        while (use := self._first(self._edge)).number < limit:
            gone += self._let_go(use, use.held)
        for use in self._uses[self._oldest : self._edge]:
            self._cut(use, use.hi - use.mid)
        return gone

    # ---------------------------------------------------------------- slices

    def _runs(self, keys: Sequence[int]) -> list[tuple[int, int, _Use]]:
        """(first, one after the last, use) of the prompt's known beginning, in order."""
        known, first = self._known, 0
        runs: list[tuple[int, int, _Use]] = []
        while first < len(keys) and (use := known.get(keys[first])) is not None:
            low, high = first + 1, min(use.hi, len(keys))
            if high > low and known.get(keys[high - 1]) is use:
                low = high
            while low < high:
                middle = (low + high) // 2
                if known.get(keys[middle]) is use:
                    low = middle + 1
                else:
                    high = middle
            runs.append((first, low, use))
            first = low
        return runs

    def _lose(self, use: _Use, first: int, end: int) -> None:
        """Another prompt has used ``[first, end)``, which is where the slice begins."""
        before = use.blocks
        held = max(0, min(end, use.mid) - first)
        self._held -= held
        self.watched -= end - first - held
        use.lo, use.mid, use.hi = end, max(end, use.mid), max(end, use.hi)
        use.trim()
        self._add(use.place, use.blocks - before)

    def _renewed(self, use: _Use | None) -> _Use:
        """The latest use: ``use``, which has lost its slice, or another."""
        self.clock += 1
        place = len(self._uses)
        if use is None:
            use = _Use(self.clock, place)
        else:
            left = _Use(use.number, use.place, unnamed=use.unnamed)
            self._uses[use.place] = left
            use.number, use.place = self.clock, place
        self._uses.append(use)
        return use

    def _holds(self, use: _Use, key: int) -> bool:
        if use.mid == use.hi:
            return True
        return use.mid > use.lo and key not in use.part(use.mid, use.hi)

    def _first(self, edge: int) -> _Use:
        """The oldest use from a place on that holds something; there must be one."""
        while not self._uses[edge].held:
            edge += 1
        self._edge = edge
        return self._uses[edge]

    def _let_go(self, use: _Use, most: int) -> list[int]:
        """Hold up to ``most`` blocks of a use less, the ends of prompts first; its keys among
        them."""
        named = min(most, use.mid - use.lo)
        gone = list(use.part(use.mid - named, use.mid))
        gone.reverse()
        use.mid -= named
        self.watched += named
        unnamed = min(most - named, use.unnamed)
        use.unnamed -= unnamed
        self._held -= named + unnamed
        if unnamed:
            self._add(use.place, -unnamed)
        return gone

    def _forget(self, most: int) -> None:
        """Up to ``most`` watched blocks of the oldest use."""
        while (use := self._uses[self._oldest]).mid == use.hi:
            self._oldest += 1
        self._cut(use, min(most, use.hi - use.mid))

    def _cut(self, use: _Use, count: int) -> None:
        gone = use.part(use.hi - count, use.hi)
        deque(map(self._known.pop, gone, repeat(None)), maxlen=0)
        use.hi -= count
        use.trim()
        self.watched -= count
        self._add(use.place, -count)

    # ---------------------------------------------------------------- the tree of counts

    def _rebuild(self) -> None:
        """Uses without blocks go; the tree gets twice the room that the others need."""
        self._uses = [use for use in self._uses if use.blocks]
        self._edge = self._oldest = 0
        self._tree = [0] * (max(_FIRST_SIZE, 2 * len(self._uses)) + 1)
        for place, use in enumerate(self._uses):
            use.place = place
            self._add(place, use.blocks)

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
