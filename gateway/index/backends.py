"""Which storage a table uses: a dict while it is small, arrays from then on where numpy is at hand.

numpy costs 15 MB of memory and a tenth of a second to load, which only a large index pays back; so
it is loaded when an index grows, and in another thread.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec

from gateway.index.table import PrefixTable
from gateway.ticks import tick

LOOK_EVERY_S = 0.5
LOAD_AT_SHARE = 0.5
"""Of the size from which arrays are used."""


def numpy_at_hand() -> bool:
    """Whether the large storage can be used."""
    return find_spec("numpy") is not None


def use_arrays(table: PrefixTable) -> None:
    """From now on a table that has grown keeps its keys in arrays."""
    table.compact = import_module("gateway.index.compact").CompactHoldings.adopt


async def grow(table: PrefixTable) -> None:
    """Watch a table, and give it the large storage in time; returns when that is done, or cannot
    be done."""
    if not numpy_at_hand():
        return
    while table.told < LOAD_AT_SHARE * table.compact_from:
        await tick(LOOK_EVERY_S)
    await asyncio.to_thread(use_arrays, table)
