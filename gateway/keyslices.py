"""Keys of blocks as slices of prompts, which nobody may have to see one by one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


class KeySlices(Collection[int]):
    """Slices in the order in which they were added, of each the end of the prompt first.

    Long prompts leave as a whole with each request, and mostly that they do is all that counts.
    """

    __slots__ = ("_size", "_slices")

    def __init__(self) -> None:
        self._slices: list[tuple[Sequence[int], int, int]] = []
        self._size = 0

    def add(self, keys: Sequence[int], first: int, last: int) -> None:
        """One more: ``keys[first:last]``, which stay as they are."""
        if first < last:
            self._slices.append((keys, first, last))
            self._size += last - first

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        for keys, first, last in self._slices:
            yield from reversed(keys[first:last])

    def __contains__(self, key: object) -> bool:
        return any(key == one for one in self)
