"""What every prefix index must do, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from gateway.index.backends import use_arrays
from gateway.index.base import PrefixIndex
from gateway.index.table import PrefixTable
from shared.blocks import GRANULE, pack_keys
from shared.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    EventBatch,
    Snapshot,
    removed,
    stored,
)
from shared.types import BlockKey, Epoch, Tier, WorkerId

A, B = WorkerId("a"), WorkerId("b")
E1, E2 = Epoch(1 << 16), Epoch(2 << 16)


def small_arrays(max_blocks: int = 1_000_000) -> PrefixTable:
    """Arrays from the first key on."""
    table = PrefixTable(max_blocks, Random(0))
    use_arrays(table)
    table.compact_from = 1
    return table


IMPLEMENTATIONS: dict[str, Callable[[], PrefixIndex]] = {
    "table": lambda: PrefixTable(1_000_000, Random(0)),
    "arrays": small_arrays,
}


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return IMPLEMENTATIONS[request.param]()


def keys(*values: int) -> list[BlockKey]:
    return [BlockKey(value) for value in values]


def batch(
    seq: int,
    *events: CacheEvent,
    worker: WorkerId = A,
    epoch: Epoch = E1,
    stride: int = 1,
    source: str = "worker",
) -> EventBatch:
    return EventBatch(worker, epoch, source, seq, 0.0, stride, events)


def snapshot(*values: int) -> Snapshot:
    return Snapshot(pack_keys(values))


def matched(index: PrefixIndex, *values: int) -> dict[str, int]:
    return {worker: match.tokens for worker, match in index.match(keys(*values)).items()}


def test_match_counts_from_the_first_token(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.join(B, E1, 1)
    index.apply(batch(1, stored([1, 2, 3], None)))
    index.apply(batch(1, stored([1, 2], None), worker=B))
    assert matched(index, 1, 2, 3, 4) == {"a": 3 * GRANULE, "b": 2 * GRANULE}
    assert matched(index, 1) == {"a": GRANULE, "b": GRANULE}
    assert matched(index, 9, 1, 2) == {}
    assert matched(index) == {}


def test_a_hole_ends_the_match(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1, 2, 3, 4, 5, 6, 7, 8], None)))
    index.apply(batch(2, removed([3])))
    assert matched(index, 1, 2, 3, 4, 5) == {"a": 2 * GRANULE}
    index.apply(batch(3, removed([1])))
    assert matched(index, 1, 2, 3, 4, 5) == {}


def test_match_is_exact_for_long_prompts_and_many_workers(index: PrefixIndex) -> None:
    prompt = list(range(1000, 1700))
    depths = {WorkerId(f"w{n}"): n * 10 for n in range(70)}
    for worker, depth in depths.items():
        index.join(worker, E1, 1)
        index.apply(batch(1, stored(prompt[:depth], None), worker=worker))
    expected = {worker: depth * GRANULE for worker, depth in depths.items() if depth}
    assert matched(index, *prompt) == expected


def test_larger_blocks_are_never_credited_in_part(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.join(B, E1, 2)
    index.apply(batch(1, stored([1, 2, 3, 4], None)))
    index.apply(batch(1, stored([2, 4], None), worker=B, stride=2))
    assert matched(index, 1, 2, 3) == {"a": 3 * GRANULE, "b": 2 * GRANULE}
    assert matched(index, 1) == {"a": GRANULE}
    assert matched(index, 1, 2, 3, 4, 5) == {"a": 4 * GRANULE, "b": 4 * GRANULE}


def test_a_batch_of_another_stride_is_not_taken_in(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    assert index.apply(batch(1, stored([1], None), stride=2)).reason == "wrong_stride"
    assert matched(index, 1) == {}
    assert index.blocks(A) == 0


def test_duplicates_change_nothing(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    assert index.apply(batch(1, stored([1], None))).reason == "applied"
    assert index.apply(batch(2, removed([1]))).reason == "applied"
    again = index.apply(batch(1, stored([1], None)))
    assert (again.ok, again.reason) == (True, "duplicate")
    assert matched(index, 1) == {}
    assert index.position(A) == (E1, 2)


def test_after_a_gap_only_a_snapshot_is_believed(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1], None)))
    for seq in (3, 4, 2):
        refused = index.apply(batch(seq, stored([2], None)))
        assert (refused.ok, refused.reason) == (False, "gap")
    assert matched(index, 1, 2) == {"a": GRANULE}, "what was known stays in use"
    assert index.position(A) == (E1, 1)
    assert index.apply(batch(4, snapshot(5, 6))).ok
    assert matched(index, 1) == {}
    assert matched(index, 5, 6) == {"a": 2 * GRANULE}
    assert index.apply(batch(5, stored([7], 6))).reason == "applied"
    assert matched(index, 5, 6, 7) == {"a": 3 * GRANULE}


def test_a_worker_that_is_met_late_needs_a_snapshot(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    assert index.position(A) is None
    assert not index.apply(batch(7, stored([1], None))).ok
    assert index.position(A) is None
    assert not index.apply(batch(8, stored([1], None))).ok
    assert index.apply(batch(8, snapshot(1))).ok
    assert index.position(A) == (E1, 8)
    assert index.apply(batch(9, stored([2], 1))).ok


def test_an_outdated_snapshot_does_not_turn_back_time(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1], None)))
    index.apply(batch(2, removed([1])))
    assert index.apply(batch(1, snapshot(1))).reason == "duplicate"
    assert matched(index, 1) == {}
    assert index.apply(batch(2, snapshot(3))).reason == "applied"
    assert matched(index, 3) == {"a": GRANULE}


def test_sources_are_numbered_apart(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    assert index.apply(batch(1, stored([1], None))).ok
    assert index.apply(batch(1, stored([2], 1), source="gateway")).reason == "applied"
    assert not index.apply(batch(3, stored([3], 2), source="gateway")).ok
    assert index.apply(batch(2, stored([3], 2))).reason == "applied"
    assert index.position(A, "gateway") == (E1, 1)


def test_a_new_epoch_starts_empty_and_the_old_one_is_ignored(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1], None)))
    index.join(A, E1, 1)
    assert matched(index, 1) == {"a": GRANULE}, "the same epoch again is no news"
    index.join(A, E2, 1)
    assert matched(index, 1) == {}
    assert index.position(A) is None
    late = index.apply(batch(2, stored([2], 1)))
    assert (late.ok, late.reason) == (True, "old_epoch")
    assert index.apply(batch(1, stored([3], None), epoch=E2)).ok
    assert matched(index, 3) == {"a": GRANULE}


def test_a_batch_of_a_newer_epoch_empties_the_worker(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1], None)))
    assert index.apply(batch(1, stored([2], None), epoch=E2)).ok
    assert matched(index, 1) == {}
    assert matched(index, 2) == {"a": GRANULE}


def test_forget_and_return(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.join(B, E1, 1)
    for worker in (A, B):
        index.apply(batch(1, stored([1, 2], None), worker=worker))
    index.forget(A)
    index.forget(A)
    assert matched(index, 1, 2) == {"b": 2 * GRANULE}
    assert (index.blocks(A), index.blocks(B)) == (0, 2)
    assert index.apply(batch(2, stored([3], 2))).reason == "unknown_worker"
    index.join(A, E1, 1)
    assert matched(index, 1, 2) == {"b": 2 * GRANULE}, "nothing comes back by itself"


def test_cleared_keeps_the_numbering(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1, 2], None)))
    index.apply(batch(2, CacheCleared(), stored([1], None)))
    assert matched(index, 1, 2) == {"a": GRANULE}
    assert index.blocks(A) == 1
    assert index.apply(batch(3, stored([2], 1))).ok


def test_tiers_that_no_match_can_use_are_left_alone(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    disk = BlocksStored(pack_keys([1]), None, Tier.DISK)
    assert index.apply(batch(1, disk)).ok
    assert matched(index, 1) == {}
    index.apply(batch(2, stored([1], None)))
    index.apply(batch(3, BlocksRemoved(pack_keys([1]), Tier.DISK)))
    assert matched(index, 1) == {"a": GRANULE}


def by_tier(index: PrefixIndex, *values: int) -> dict[str, tuple[int, int]]:
    """Granules on the device and in host memory."""
    return {
        worker: ((match.tokens - match.host_tokens) // GRANULE, match.host_tokens // GRANULE)
        for worker, match in index.match(keys(*values)).items()
    }


def test_a_match_goes_on_in_host_memory(index: PrefixIndex) -> None:
    for worker in (A, B):
        index.join(worker, E1, 1)
    index.apply(batch(1, stored([1, 2], None), stored([3, 4], None, Tier.HOST)))
    index.apply(batch(1, stored([3, 1, 2], None, Tier.HOST), worker=B))
    assert by_tier(index, 1, 2, 3, 4, 5) == {"a": (2, 2), "b": (0, 3)}
    assert by_tier(index, 1, 2) == {"a": (2, 0), "b": (0, 2)}
    assert by_tier(index, 3) == {"a": (0, 1), "b": (0, 1)}
    assert (index.blocks(A), index.blocks(A, Tier.HOST)) == (2, 2)
    index.apply(batch(2, removed([3], Tier.HOST)))
    assert by_tier(index, 1, 2, 3, 4) == {"a": (2, 0), "b": (0, 3)}


def test_a_block_moves_between_the_tiers(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1, 2, 3], None)))
    index.apply(batch(2, removed([3, 2]), stored([3, 2], None, Tier.HOST)))
    assert by_tier(index, 1, 2, 3) == {"a": (1, 2)}
    index.apply(batch(3, stored([2], 1), removed([2], Tier.HOST)))
    assert by_tier(index, 1, 2, 3) == {"a": (2, 1)}
    index.apply(batch(4, CacheCleared()))
    assert by_tier(index, 1, 2, 3) == {}
    assert index.blocks(A, Tier.HOST) == 0
    assert index.apply(batch(5, stored([3], None, Tier.HOST))).ok
    assert by_tier(index, 3) == {"a": (0, 1)}


def test_a_snapshot_of_the_device_empties_host_memory_too(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1], None), stored([2, 9], None, Tier.HOST)))
    index.apply(batch(5, snapshot(1), Snapshot(pack_keys([2, 3]), Tier.HOST)))
    assert by_tier(index, 1, 2, 3) == {"a": (1, 2)}
    assert by_tier(index, 9) == {}
    index.apply(batch(9, snapshot(1)))
    assert by_tier(index, 1, 2) == {"a": (1, 0)}
    assert index.blocks(A, Tier.HOST) == 0


def test_a_snapshot_of_host_memory_alone_needs_its_predecessor(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1], None), stored([2], None, Tier.HOST)))
    assert index.apply(batch(3, Snapshot(pack_keys([3]), Tier.HOST))).reason == "gap"
    assert index.apply(batch(4, snapshot(1))).ok
    assert index.apply(batch(5, Snapshot(pack_keys([3]), Tier.HOST))).reason == "applied"
    assert by_tier(index, 1) == {"a": (1, 0)}
    assert by_tier(index, 3) == {"a": (0, 1)}


def test_a_departed_worker_leaves_nothing_in_host_memory(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1], None, Tier.HOST)))
    index.forget(A)
    assert by_tier(index, 1) == {}
    index.join(A, E2, 1)
    assert by_tier(index, 1) == {}
    assert index.blocks(A, Tier.HOST) == 0


def test_larger_blocks_in_host_memory_are_credited_whole(index: PrefixIndex) -> None:
    index.join(A, E1, 2)
    index.apply(batch(1, stored([2], None), stored([4, 6], None, Tier.HOST), stride=2))
    index.apply(batch(2, removed([6], Tier.HOST), stride=2))
    assert by_tier(index, 1, 2, 3, 4, 5, 6) == {"a": (2, 2)}


def test_unknown_keys_and_repeats_do_not_spoil_the_count(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1, 1, 2], None), stored([2, 3], 1), removed([9, 3, 3])))
    assert index.blocks(A) == 2


def test_match_does_not_mutate(index: PrefixIndex) -> None:
    index.join(A, E1, 1)
    index.apply(batch(1, stored([1, 2], None)))
    before = (index.blocks(A), index.position(A))
    first = dict(index.match(keys(1, 2, 3)))
    assert dict(index.match(keys(1, 2, 3))) == first
    assert (index.blocks(A), index.position(A)) == before
