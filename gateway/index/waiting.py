"""Changes of who holds which key that were put off, to be carried out many at a time. Pure.

added[key]      bits of slots that hold it, too
removed[key]    bits of slots that hold it no longer; none of them in ``added[key]``
"""

from __future__ import annotations

from itertools import repeat

from gateway.index.slots import by_mask

Change = tuple[int, int]
"""Bits added and bits removed."""


class Waiting:
    """Key -> its change."""

    def __init__(self) -> None:
        self._added: dict[int, int] = {}
        self._removed: dict[int, int] = {}
        self.added = 0
        """(key, slot) pairs that were added, at most."""

    def __len__(self) -> int:
        """Keys that change, those that do in both ways twice."""
        return len(self._added) + len(self._removed)

    def add(self, bit: int, keys: list[int]) -> None:
        """A slot holds ``keys``, too."""
        _take(self._removed, bit, keys)
        _give(self._added, bit, keys)
        self.added += len(keys)

    def remove(self, bit: int, keys: list[int]) -> None:
        """A slot holds ``keys`` no longer."""
        _take(self._added, bit, keys)
        _give(self._removed, bit, keys)

    def changed(self, key: int, mask: int) -> int:
        """Who holds a key that ``mask`` held before. Pure."""
        return mask & ~self._removed.get(key, 0) | self._added.get(key, 0)

    def take(self) -> tuple[list[int], list[int], list[Change]]:
        """Everything, which is forgotten: the keys, the kind of change of each, and the kinds."""
        added, removed = self._added, self._removed
        self._added, self._removed, self.added = {}, {}, 0
        keys = list(added | removed)
        changes = list(
            zip(map(added.get, keys, repeat(0)), map(removed.get, keys, repeat(0)), strict=True)
        )
        kinds = {change: place for place, change in enumerate(dict.fromkeys(changes))}
        return keys, list(map(kinds.__getitem__, changes)), list(kinds)


def _give(table: dict[int, int], bit: int, keys: list[int]) -> None:
    masks = list(map(table.setdefault, keys, repeat(bit)))
    if masks.count(bit) < len(masks):
        for mask, group in by_mask(keys, masks, besides=bit):
            table.update(dict.fromkeys(group, mask | bit))


def _take(table: dict[int, int], bit: int, keys: list[int]) -> None:
    if not table:
        return
    for key in keys:
        mask = table.get(key)
        if mask is None:
            continue
        if mask == bit:
            del table[key]
        else:
            table[key] = mask & ~bit
