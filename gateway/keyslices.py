"""Keys of blocks as slices of prompts, which nobody may have to see one by one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


class KeySlices(Collection[int]):
    """Slices in the order in which they were added, of each the end of the prompt first.

    Long prompts leave as a whole with each request, and mostly that they do is all that counts.
    """

    __slots__ = ("slices",)

    def __init__(self) -> None:
        self.slices: list[tuple[Sequence[int], int, int]] = []
        """Each is ``keys[first:last]``, with ``first < last`` and keys that stay as they are."""

    def __len__(self) -> int:
        return sum(last - first for _, first, last in self.slices)

    def __iter__(self) -> Iterator[int]:
        for keys, first, last in self.slices:
            yield from reversed(keys[first:last])

    def __contains__(self, key: object) -> bool:
        return any(key == one for one in self)
