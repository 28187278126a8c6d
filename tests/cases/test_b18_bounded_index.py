"""B18: the index holds what it may hold, and gives its memory back.

Scaled: 12,000 entries as the cap and 6 times as many stored, from four workers, with removals.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from random import Random
from types import FunctionType, MethodType

import pytest

from gateway.index.backends import use_arrays
from gateway.index.table import PrefixTable
from shared.blocks import pack_keys
from shared.events import BlocksRemoved, BlocksStored, EventBatch
from shared.types import Epoch, WorkerId

CAP = 12_000
PROMPT = 40
WORKERS = [WorkerId(f"w{n}") for n in range(4)]


@pytest.fixture(params=["dict", "arrays"])
def table(request) -> PrefixTable:
    """Both ways of storing it."""
    table = PrefixTable(CAP, random.Random(1))
    if request.param == "arrays":
        use_arrays(table)
        table.compact_from = 1
    return table


def test_memory_levels_off_and_comes_back(table: PrefixTable) -> None:
    rng = random.Random(2)
    for worker in WORKERS:
        table.join(worker, Epoch(1), 1)
    seqs = dict.fromkeys(WORKERS, 0)
    held: dict[WorkerId, list[bytes]] = {worker: [] for worker in WORKERS}
    marks = []
    n = 6 * CAP // PROMPT
    for number in range(n):
        worker = WORKERS[number % 4]
        keys = pack_keys([rng.getrandbits(64) for _ in range(PROMPT)])
        events: list[BlocksStored | BlocksRemoved] = [BlocksStored(keys, None)]
        held[worker].append(keys)
        if rng.random() < 0.3:
            events.append(BlocksRemoved(held[worker].pop(rng.randrange(len(held[worker])))))
        seqs[worker] += 1
        batch = EventBatch(worker, Epoch(1), "worker", seqs[worker], 0.0, 1, tuple(events))
        assert table.apply(batch).ok
        assert table.entries <= CAP
        if number % (n // 24) == 0:
            marks.append(deep_size(table))
    quarter = len(marks) // 4
    # A table that is being rebuilt is there twice, for the moment.
    levels = [
        sorted(part)[quarter // 2] for part in (marks[-2 * quarter : -quarter], marks[-quarter:])
    ]
    assert levels[1] < 1.05 * levels[0]
    for worker in WORKERS:
        table.forget(worker)
    while table.tidy(1_000_000):
        pass
    assert table.entries == 0
    assert deep_size(table) < max(0.1 * max(marks), 25_000)


def deep_size(*roots: object) -> int:
    """Bytes of all that can be reached, each counted once; functions and classes left out."""
    seen: dict[int, object] = {}
    left = list(roots)
    total = 0
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | FunctionType | MethodType | Random):
            continue
        seen[id(each)] = each
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | deque):
            left += each
        else:
            left += vars(each).values() if hasattr(each, "__dict__") else ()
            names = [n for c in type(each).__mro__ for n in getattr(c, "__slots__", ())]
            left += [getattr(each, name) for name in names if hasattr(each, name)]
    return total
