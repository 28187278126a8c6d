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

from collections.abc import Sequence

import msgspec

_FIRST_SIZE = 256
_CHUNK_BITS = 6


class _Use(msgspec.Struct, eq=False):
    """The blocks that were used last by one and the same prompt."""

    number: int
    """Larger is later."""
    place: int
    """In the list of uses."""
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
        self._counts: list[int] = []
        """How many blocks each use still has."""
        self._sums = [0]
        """Those of 64 uses each."""
        self._most = _FIRST_SIZE
        """So many uses there may be until those without blocks leave the list."""
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
        if len(self._uses) >= self._most:
            self._rebuild()
        known, size = self._known, len(keys)
        kept, begin, stop = None, 0, 0  # the longest slice that is whole
        held: int | None = None
        runs: list[tuple[int, int, _Use]] = []
        if size and keys[0] in known:
            runs = self._runs(keys)
            for first, end, use in runs:
                if held is None and use.mid < end:
                    held = max(first, use.mid)
                if first == use.lo and end == use.hi and end - first > stop - begin:
                    kept, begin, stop = use, first, end
            for first, end, use in runs:
                self._lose(use, first, end)
            if held is None:
                held = runs[-1][1]
        use = self._renewed(kept, keys, unnamed)
        if stop - begin < size:
            for part in (keys[:begin], keys[stop:]) if stop else (keys,):
                for key in part:
                    known[key] = use
        self._held += size + unnamed
        return keys[held:] if held else keys

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
        held = max(0, min(end, use.mid) - first)
        self._held -= held
        self.watched -= end - first - held
        before = use.hi - use.lo
        use.lo, use.mid, use.hi = end, max(end, use.mid), max(end, use.hi)
        use.trim()
        self._add(use.place, use.hi - end - before)

    def _renewed(self, use: _Use | None, keys: Sequence[int], unnamed: int) -> _Use:
        """The latest use, of all of a prompt: ``use``, which has lost its slice, or another."""
        self.clock += 1
        uses, place, size = self._uses, len(self._uses), len(keys)
        if use is None:
            use = _Use(self.clock, place, keys, 0, 0, size, size, unnamed)
        else:
            uses[use.place] = _Use(use.number, use.place, unnamed=use.unnamed)
            use.number, use.place, use.unnamed = self.clock, place, unnamed
            use.path, use.base, use.lo, use.mid, use.hi = keys, 0, 0, size, size
        uses.append(use)
        self._counts.append(size + unnamed)
        if place >> _CHUNK_BITS == len(self._sums):
            self._sums.append(0)
        self._sums[place >> _CHUNK_BITS] += size + unnamed
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
        forget = self._known.pop
        for key in gone:
            forget(key, None)
        use.hi -= count
        use.trim()
        self.watched -= count
        self._add(use.place, -count)

    # ---------------------------------------------------------------- counts by place

    def _rebuild(self) -> None:
        """Uses without blocks go; there may be twice as many as the others."""
        self._uses = [use for use in self._uses if use.blocks]
        self._edge = self._oldest = 0
        self._most = max(_FIRST_SIZE, 2 * len(self._uses))
        self._counts = [use.blocks for use in self._uses]
        chunk = 1 << _CHUNK_BITS
        starts = range(0, max(1, len(self._uses)), chunk)
        self._sums = [sum(self._counts[start : start + chunk]) for start in starts]
        for place, use in enumerate(self._uses):
            use.place = place

    def _add(self, place: int, change: int) -> None:
        self._counts[place] += change
        self._sums[place >> _CHUNK_BITS] += change

    def _up_to(self, place: int) -> int:
        chunk = place >> _CHUNK_BITS
        return sum(self._sums[:chunk]) + sum(self._counts[chunk << _CHUNK_BITS : place + 1])
