"""Parts of :mod:`gateway.index.holdings`: slots, the walk that frees them, keys by their masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shared.types import WorkerId


@dataclass(slots=True)
class Slot:
    """Contents of one incarnation of a worker."""

    worker: WorkerId
    index: int
    bit: int
    count: int = 0
    """Keys held."""


@dataclass(slots=True)
class Walk:
    """A walk through the table on behalf of slots that were given up."""

    slots: list[Slot]
    bits: int
    keys: Iterator[int]
    """Those that are left; a key that came later has none of the bits."""


def by_mask(
    keys: list[int], masks: list[int], *, besides: int
) -> Iterable[tuple[int, dict[int, None]]]:
    """Keys in groups of equal masks, each key once in its group; without those of ``besides``."""
    kinds = set(masks)
    kinds.discard(besides)
    if len(kinds) == 1 and besides not in masks:
        return [(masks[0], dict.fromkeys(keys))]
    groups: dict[int, dict[int, None]] = {kind: {} for kind in kinds}
    for key, mask in zip(keys, masks, strict=True) if kinds else ():
        if mask != besides:
            groups[mask][key] = None
    return groups.items()
