"""Where matches end: (depth, mask of the slots whose match ends there), depth > 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Ends = list[tuple[int, int]]


def bisected(mask_of: Callable[[int], int | None], keys: Sequence[int], alive: int) -> Ends:
    """Of slots in which there are no holes: along a prompt they only become fewer.

    :param mask_of: key -> mask of its holders; None: it has none.
    :param alive: mask of the slots in question.
    """
    ends: Ends = []
    start, last = 0, len(keys) - 1
    while alive and start <= last:
        kept = alive & (mask_of(keys[start]) or 0)
        if start and kept != alive:
            ends.append((start, alive ^ kept))
        alive = kept
        if not alive:
            break
        if alive & (mask_of(keys[last]) or 0) == alive:
            ends.append((len(keys), alive))
            break
        low, high = start + 1, last
        while low < high:
            middle = (low + high) // 2
            if alive & (mask_of(keys[middle]) or 0) == alive:
                low = middle + 1
            else:
                high = middle
        start = low
    return ends


def stepped(mask_of: Callable[[int], int | None], keys: Sequence[int], alive: int) -> Ends:
    """Of any slots, key by key; see :func:`bisected`."""
    ends: Ends = []
    for depth, key in enumerate(keys if alive else ()):
        kept = alive & (mask_of(key) or 0)
        if kept != alive:
            if depth:
                ends.append((depth, alive ^ kept))
            if not kept:
                return ends
            alive = kept
    if keys and alive:
        ends.append((len(keys), alive))
    return ends


def apart(one: Ends, other: Ends) -> int:
    """Mask of the slots whose matches end in different places."""
    found = 0
    for depth, mask in one:
        for elsewhere, others in other:
            if elsewhere != depth:
                found |= mask & others
    return found
