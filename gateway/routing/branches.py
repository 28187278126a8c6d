"""How many different continuations a prefix has had: its *branches*.

A prefix from which many prompts went on in different ways (a system prompt, a stock document) will
be asked for again wherever it is computed; one that only one conversation extends will not. So the
count says how much of a recomputation is an investment rather than a loss.

A branch is counted when a prompt leaves a known prefix from which another one had gone on before,
and at the request, not at its answer: a burst on a new system prompt shows at once. A conversation
that extends its own last prompt makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.blocks import GRANULE
from shared.types import BlockKey


@dataclass(frozen=True, slots=True)
class Popularity:
    """How popular the granules of one prompt are: runs of equal counts, falling with depth."""

    runs: tuple[tuple[int, int, float], ...] = ()
    """(first granule, one after the last, share of a recomputation that pays itself back)."""

    def shared_tokens(self, known: int) -> float:
        """Of the tokens beyond the first ``known``: those whose recomputation pays itself back."""
        if not self.runs:
            return 0.0
        first = known // GRANULE
        granules = sum(
            (end - max(start, first)) * share for start, end, share in self.runs if end > first
        )
        return granules * GRANULE

    def branches(self, known: int) -> float:
        """How many different prompts went on below the first granule beyond ``known`` tokens; at
        least 1."""
        if not self.runs:
            return 1.0
        first = known // GRANULE
        share = next((share for _, end, share in self.runs if end > first), 0.0)
        return float(1.0 / (1.0 - share) ** 0.5)


NOBODY = Popularity()
"""Of a prompt that shares nothing."""


class Branches:
    """Branch counts of prefixes, in bounded memory.

    :param max_keys: prefixes and prompt ends kept at most, each. When there are more, all counts
        are halved, and prefixes with only one branch more than usual are forgotten.
    """

    def __init__(self, max_keys: int) -> None:
        self._max = max_keys
        self._more: dict[int, int] = {}
        """Key -> branches beyond the first. Falls along every path."""
        self._ends: dict[int, bool] = {}
        """Last keys of prompts, oldest first; True: no other prompt went on from there yet."""

    def __len__(self) -> int:
        return len(self._more)

    def asked(self, keys: Sequence[BlockKey], known: int) -> None:
        """A prompt was asked for whose first ``known`` granules are known from prompts before."""
        if known >= len(keys):
            return
        ends, end = self._ends, None
        for key in reversed(keys[:known]) if known else ():
            if ends.get(key):
                end = key
                break
        if end is not None:
            ends[end] = False
        elif known:
            more = self._more
            for key in keys[:known]:
                more[key] = more.get(key, 0) + 1
            if len(more) > self._max:
                self._age()
        ends.pop(keys[-1], None)
        ends[keys[-1]] = True
        if len(ends) > self._max:
            del ends[next(iter(ends))]

    def ended(self, key: BlockKey) -> bool:
        """Whether a prompt ended there: what is known beyond is its answer. Pure."""
        return key in self._ends

    def popularity(self, keys: Sequence[BlockKey]) -> Popularity:
        """Of a prompt's granules. Pure."""
        if not keys or keys[0] not in self._more:
            return NOBODY
        runs: list[tuple[int, int, float]] = []
        start = 0
        while start < len(keys):
            more = self._more.get(keys[start], 0)
            if not more:
                break
            end = self._end_of_run(keys, start, more)
            runs.append((start, end, 1.0 - 1.0 / (more + 1) ** 2))
            start = end
        return Popularity(tuple(runs))

    def _end_of_run(self, keys: Sequence[BlockKey], start: int, more: int) -> int:
        low, high = start + 1, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._more.get(keys[middle], 0) == more:
                low = middle + 1
            else:
                high = middle
        return low

    def _age(self) -> None:
        self._more = {key: more // 2 for key, more in self._more.items() if more > 1}
