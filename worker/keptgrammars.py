"""Which compiled grammars are kept: the latest used of each salt, and a fair share where many ask.

What one salt's requests compile must not push out another one's: a tenant would pay for its
neighbours, and could tell from its own first-token times how many grammars they send. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

from worker.guide import Grammar

MOST_OF_ONE = 64
"""Kept for one salt."""
MOST = 256
"""Kept for all together. Beyond it whoever has most gives up the one it used longest ago, so nobody
goes below an equal share for another's sake."""


class KeptGrammars:
    """By salt and what they were compiled from. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[tuple[str, str], Grammar]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, salt: str, source: tuple[str, str]) -> Grammar | None:
        """One that was kept; it is the latest used now."""
        own = self._kept.get(salt)
        if own is None or source not in own:
            return None
        own.move_to_end(source)
        return own[source]

    def keep(self, salt: str, source: tuple[str, str], grammar: Grammar) -> None:
        """Keep one, and let go of another if these are too many."""
        own = self._kept.setdefault(salt, OrderedDict())
        self._count += source not in own
        own[source] = grammar
        own.move_to_end(source)
        if len(own) > MOST_OF_ONE:
            self._let_go(salt)
        if self._count > MOST:
            self._let_go(max(self._kept, key=lambda each: len(self._kept[each])))

    def _let_go(self, salt: str) -> None:
        own = self._kept[salt]
        own.popitem(last=False)
        self._count -= 1
        if not own:
            del self._kept[salt]
