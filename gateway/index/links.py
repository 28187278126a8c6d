"""Which key was stored below which: shows that a key was removed whose child is still held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

_MOST = 16_384


class Links:
    """Key -> the key that was stored below it last, in two generations: what was stored of late.

    :param most: links kept at most.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._half = max(1, most // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def note(self, keys: list[int], parent: int | None) -> None:
        """Keys of one chain were stored, each below the last, the first below ``parent``."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        if parent is not None and keys:
            self._young[parent] = keys[0]
        # The end of a chain goes first when something is removed.
        kept = keys[-self._half :]
        self._young.update(zip(kept, islice(kept, 1, None), strict=False))

    def below(self, keys: Iterable[int]) -> Iterator[int]:
        """The keys below ``keys``, as far as they are known. Pure."""
        young, old = self._young, self._old
        for key in keys:
            child = young.get(key) or old.get(key)
            if child is not None:
                yield child
