"""A bounded memory of prompts that were served once: tells *evicted* from *never seen*."""

from __future__ import annotations

from collections.abc import Sequence

from shared.types import BlockKey


class GhostMemory:
    """Keys seen, in two generations: when the young one is full it becomes the old one.

    A prompt enters as a whole, so each generation is closed under taking prefixes and a bisection
    finds how much of a prompt was seen. A worker's death clears nothing.

    :param max_keys: keys kept at most, both generations together.
    """

    def __init__(self, max_keys: int) -> None:
        self._half = max(1, max_keys // 2)
        self._young: set[int] = set()
        self._old: set[int] = set()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def remember(self, keys: Sequence[BlockKey]) -> None:
        """A prompt was served."""
        young = self._young
        known = _depth(young, keys)
        if known == len(keys):
            return
        if len(young) + len(keys) - known > self._half:
            self._old, young, known = young, set(), 0
            self._young = young
        # A prompt longer than the whole memory is remembered by its beginning.
        young.update(keys[known : self._half])

    def seen(self, keys: Sequence[BlockKey]) -> int:
        """Leading granules of ``keys`` that were seen. Pure."""
        young = _depth(self._young, keys)
        return young if young == len(keys) else max(young, _depth(self._old, keys))


def _depth(known: set[int], keys: Sequence[BlockKey]) -> int:
    if not known or not keys or keys[0] not in known:
        return 0
    low, high = 1, len(keys)
    if keys[-1] in known:
        return high
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low
