"""Blocks in the order of their last use, and how much was used since each: LRU stack distances.

A cache of ``n`` blocks that evicts what was used longest ago holds exactly the keys at a distance
below ``n``, whatever was hit and whatever was inserted in between.

    oldest  [ .. watched .. | .............. held .............. ]  newest

Keys come as prompts, and a key stands for all that comes before it: whoever uses a key uses those
before it as well. So what is known is closed under taking prefixes, along a prompt the last uses
never rise, and the blocks that were used last by one prompt are a slice of its keys:

    use = prompt[lo:mid] held, prompt[mid:hi] watched      lo rises when others use the beginning,
                                                           mid and hi fall when its end gets too old

A key also stands for its place. So two prompts agree exactly up to where their keys begin to
differ, and a slice is found by its first key: who took what came before it is used later, and where
a prompt leaves one slice it meets the next one at its beginning, or nothing that is known. Ends of
slices are bisected for, and nothing is done key by key.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.keyslices import KeySlices

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

    def part(self, first: int, last: int) -> Sequence[int]:
        return self.path[first - self.base : last - self.base]

    def owns(self, keys: Sequence[int], at: int) -> bool:
        """Whether ``keys[at]`` is one of its own; ``at`` is not before its first."""
        return at < self.hi and self.path[at - self.base] == keys[at]

    def shared(self, keys: Sequence[int], last: int) -> int:
        """Up to where its path and ``keys``, which has its first key, are the same; not beyond
        ``last``."""
        path, base, low = self.path, self.base, self.lo + 1
        if last <= low or path[last - 1 - base] == keys[last - 1]:
            return last
        high = last - 1
        while low < high:
            middle = (low + high) // 2
            if path[middle - base] == keys[middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def trim(self) -> None:
        """Let go of keys that it has lost, once they are most of what it lists."""
        if self.hi - self.lo < len(self.path) // 2:
            self.path, self.base = self.part(self.lo, self.hi), self.lo


class Recency:
    """Held and watched blocks of one worker.

    :param clock: of the last use before.
    """

    def __init__(self, clock: int = 0) -> None:
        self.clock = clock
        """Number of the last use."""
        self.clear()

    def clear(self) -> None:
        """All blocks are gone."""
        self._first: dict[int, _Use] = {}
        """Uses by the first key of their slice."""
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
        self._held = self._unnamed = self.watched = 0
        """``watched``: blocks that are not held any more, but known."""

    def __len__(self) -> int:
        return self._held

    def touch(self, keys: Sequence[int], unnamed: int = 0) -> Sequence[int]:
        """A prompt's keys were used, first to last; returns those that were not held.

        :param unnamed: so many further blocks, whose keys nobody will ask for (an answer's).
        """
        if len(self._uses) >= self._most:
            self._rebuild()
        size = len(keys)
        held: int | None = 0
        if size and keys[0] in self._first:
            held, runs = None, self._runs(keys)
            for first, end, use in runs:
                if held is None and use.mid < end:
                    held = max(first, use.mid)
                self._lose(use, first, end)
            if held is None:
                held = runs[-1][1]
        self._put(keys, unnamed)
        self._held += size + unnamed
        self._unnamed += unnamed
        return keys[held:] if held else keys

    @property
    def entries(self) -> int:
        """Blocks that are held and whose keys are known. Pure."""
        return self._held - self._unnamed

    def depth(self, keys: Sequence[int]) -> int:
        """How many of a prompt's first keys are held. Pure."""
        size, first, slices = len(keys), 0, self._first
        while first < size and (use := slices.get(keys[first])) is not None:
            high = size if use.mid > size else use.mid
            if high <= first:
                break
            first = use.shared(keys, high)
        return first

    def distance(self, keys: Sequence[int], at: int) -> int | None:
        """How many blocks were used after ``keys[at]`` of a prompt; None: it is not known. Pure."""
        use = self._owner(keys, at)
        if use is None:
            return None
        return self._held + self.watched - self._up_to(use.place)

    def used(self, keys: Sequence[int], at: int) -> int | None:
        """``clock`` at the last use of ``keys[at]`` of a prompt; None: it is not held. Pure."""
        use = self._owner(keys, at)
        return None if use is None or at >= use.mid else use.number

    def last_but(self, keys: Sequence[int], clock: int) -> int | None:
        """Place of the last of a prompt's keys, but for those that are held and were used after
        ``clock``; None: there is no other. Pure."""
        runs = self._runs(keys)
        if keys and (not runs or runs[-1][1] < len(keys)):
            return len(keys) - 1
        for _, end, use in reversed(runs):
            if use.mid < end or use.number <= clock:
                return end - 1
        return None

    def keep(self, most: int, watch: int = 0) -> KeySlices:
        """Hold the newest ``most`` blocks and watch at most ``watch`` of the others; returns the
        keys that are not held any more, the oldest first."""
        gone = KeySlices()
        while self._held > most:
            self._let_go(self._first_held(self._edge), self._held - most, gone)
        while self.watched > watch:
            self._forget(self.watched - watch)
        return gone

    def shed(self, count: int) -> None:
        """Hold so many named blocks less, or none, the oldest first; they are watched."""
        left = max(0, self.entries - count)
        while self.entries > left:
            most = self._held - (self.entries - left)
            self.keep(most, self.watched + count)

    def drop_before(self, keys: Sequence[int], at: int) -> KeySlices:
        """Forget all that was used last before ``keys[at]`` of a prompt was, which is held;
        returns what of it was held, the oldest first."""
        owner = self._owner(keys, at)
        assert owner is not None
        limit = owner.number
        gone = KeySlices()
        while (use := self._first_held(self._edge)).number < limit:
            self._let_go(use, use.held, gone)
        for use in self._uses[self._oldest : self._edge]:
            self._cut(use, use.hi - use.mid)
        return gone

    # ---------------------------------------------------------------- slices

    def _runs(self, keys: Sequence[int]) -> list[tuple[int, int, _Use]]:
        """(first, one after the last, use) of the prompt's known beginning, in order."""
        first, size, slices = 0, len(keys), self._first
        runs: list[tuple[int, int, _Use]] = []
        while first < size and (use := slices.get(keys[first])) is not None:
            end = use.shared(keys, use.hi if use.hi < size else size)
            runs.append((first, end, use))
            first = end
        return runs

    def _owner(self, keys: Sequence[int], at: int) -> _Use | None:
        """Whose block ``keys[at]`` is."""
        first, slices = 0, self._first
        while first <= at and (use := slices.get(keys[first])) is not None:
            if use.owns(keys, at):
                return use
            first = use.shared(keys, min(use.hi, at))
        return None

    def _lose(self, use: _Use, first: int, end: int) -> None:
        """Another prompt has used ``[first, end)``, which is where the slice begins."""
        held = (end if end < use.mid else use.mid) - first
        held = held if held > 0 else 0
        self._held -= held
        self.watched -= end - first - held
        del self._first[use.path[first - use.base]]
        if end < use.hi:
            self._first[use.path[end - use.base]] = use
        use.lo = end
        if use.mid < end:
            use.mid = end
        use.trim()
        self._add(use.place, first - end)

    def _put(self, keys: Sequence[int], unnamed: int) -> None:
        """The latest use, of all of a prompt."""
        self.clock += 1
        place, size = len(self._uses), len(keys)
        use = _Use(self.clock, place, keys, 0, 0, size, size, unnamed)
        if size:
            self._first[keys[0]] = use
        self._uses.append(use)
        self._counts.append(size + unnamed)
        if place >> _CHUNK_BITS == len(self._sums):
            self._sums.append(0)
        self._sums[place >> _CHUNK_BITS] += size + unnamed

    def _first_held(self, edge: int) -> _Use:
        """The oldest use from a place on that holds something; there must be one."""
        while not self._uses[edge].held:
            edge += 1
        self._edge = edge
        return self._uses[edge]

    def _let_go(self, use: _Use, most: int, gone: KeySlices) -> None:
        """Hold up to ``most`` blocks of a use less, the ends of prompts first; their keys are
        ``gone`` as well."""
        named = min(most, use.mid - use.lo)
        if named:
            end = use.mid - use.base
            gone.slices.append((use.path, end - named, end))
            use.mid -= named
        self.watched += named
        unnamed = min(most - named, use.unnamed)
        use.unnamed -= unnamed
        self._held -= named + unnamed
        self._unnamed -= unnamed
        if unnamed:
            self._add(use.place, -unnamed)

    def _forget(self, most: int) -> None:
        """Up to ``most`` watched blocks of the oldest use."""
        while (use := self._uses[self._oldest]).mid == use.hi:
            self._oldest += 1
        self._cut(use, min(most, use.hi - use.mid))

    def _cut(self, use: _Use, count: int) -> None:
        if count and count == use.hi - use.lo:
            del self._first[use.path[use.lo - use.base]]
        use.hi -= count
        use.trim()
        self.watched -= count
        self._add(use.place, -count)

    # ---------------------------------------------------------------- counts by place

    def _rebuild(self) -> None:
        """Uses without blocks go; there may be twice as many as the others."""
        # What each use still has is counted already.
        kept = [(use, count) for use, count in zip(self._uses, self._counts, strict=True) if count]
        self._uses, self._counts = [use for use, _ in kept], [count for _, count in kept]
        self._edge = self._oldest = 0
        self._most = max(_FIRST_SIZE, 2 * len(self._uses))
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
