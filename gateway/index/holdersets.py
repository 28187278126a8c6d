"""Sets of holders by a small id: keys that the same slots hold share one, counted by its uses.

So a cell of :mod:`gateway.index.compact` takes 12 bytes however many hold its key. An id whose last
key goes is given to another set.
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST_SET = 2
"""First id of a set: in a cell 0 is an unused one and 1 a deleted one."""


class HolderSets:
    """Mask of slots <-> id, while some key has it."""

    __slots__ = ("_ids", "_refs", "_unused", "masks")

    def __init__(self) -> None:
        self.masks: list[int] = [0] * FIRST_SET
        """By id; those below ``FIRST_SET`` hold nothing. To be read only."""
        self._refs: list[int] = [0] * FIRST_SET
        self._ids: dict[int, int] = {}
        self._unused: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, mask: int, uses: int) -> int:
        """The id of a set that so many more keys have."""
        found = self._ids.get(mask)
        if found is None:
            if self._unused:
                found = self._unused.pop()
                self.masks[found], self._refs[found] = mask, 0
            else:
                found = len(self.masks)
                self.masks.append(mask)
                self._refs.append(0)
            self._ids[mask] = found
        self._refs[found] += uses
        return found

    def release(self, set_id: int, uses: int) -> None:
        """So many keys have this set no longer; of ids that are no set's nothing is known."""
        if set_id < FIRST_SET or not uses:
            return
        self._refs[set_id] -= uses
        if not self._refs[set_id]:
            del self._ids[self.masks[set_id]]
            self._unused.append(set_id)

    def check(self, uses: Mapping[int, int]) -> None:
        """Raise ``AssertionError`` unless each id is used just so often, and no other is kept."""
        if any(self._refs[set_id] != n for set_id, n in uses.items()):
            raise AssertionError("references are counted wrongly")
        if set(self._ids.values()) != set(uses):
            raise AssertionError("a set without keys is kept")
