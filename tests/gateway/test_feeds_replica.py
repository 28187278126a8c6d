"""Sequences, holes and trust, without any road."""

from __future__ import annotations

from random import Random

import pytest
from depth import DEPTH
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.index.base import Applied
from gateway.index.replica import PENDING_LIMIT, PIECE_KEYS, SILENT_S, TAIL_LOST_S, Replica
from gateway.index.stats import FeedStats
from gateway.index.table import PrefixTable
from gateway.routing.base import Trust
from shared.blocks import pack_keys
from shared.events import EventBatch, Snapshot, removed, stored
from shared.load import WorkerInfo
from shared.types import BlockKey, Tier

INFO = WorkerInfo("w", 7, "http://w", ("m",))


def batch(seq: int, *events, epoch: int = 7, worker: str = "w", source: str = "worker"):
    return EventBatch(worker, epoch, source, seq, 0.0, 1, events or (stored([seq], None),))


def snapshot(seq: int, *keys: int, epoch: int = 7):
    return batch(seq, Snapshot(pack_keys(keys)), epoch=epoch)


class Rig:
    def __init__(self, info: WorkerInfo = INFO) -> None:
        self.stats = FeedStats()
        self.index = PrefixTable(10_000, Random(1))
        self.index.join(info.id, info.epoch, 1)
        self.replica = Replica(lambda b, now: self.index.apply(b), self.stats)
        self.replica.follow(info)

    def trust(self, now: float = 0.0):
        return self.replica.trust(self.replica.get("w"), now)

    def holds(self, *keys: int) -> bool:
        return self.index.blocks("w") == len(keys) and all(self.index.match([k]) for k in keys)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_batches_in_order_are_applied_once(rig: Rig) -> None:
    for seq in (1, 2, 2, 1, 3):
        assert rig.replica.offer(batch(seq), 0.0).ok
    assert rig.holds(1, 2, 3)
    assert (rig.stats.batches, rig.stats.duplicates, rig.stats.gaps) == (3, 2, 0)


def test_what_lies_beyond_a_hole_waits_for_it_to_be_closed(rig: Rig) -> None:
    rig.replica.offer(batch(1), 0.0)
    assert rig.replica.offer(batch(4), 0.0).reason == "gap"
    assert rig.replica.offer(batch(3), 0.0).reason == "gap"
    assert rig.replica.out_of_step() == ["w"]
    assert rig.holds(1)
    assert rig.replica.offer(batch(2), 0.0).ok
    assert rig.holds(1, 2, 3, 4)
    assert rig.replica.out_of_step() == []
    assert rig.stats.gaps == 1, "one hole, however many batches lie beyond it"


def test_a_snapshot_closes_a_hole_and_an_old_one_does_not(rig: Rig) -> None:
    rig.replica.offer(batch(1), 0.0)
    rig.replica.offer(batch(9), 0.0)
    assert rig.replica.offer(snapshot(5, 50), 0.0).ok
    assert rig.replica.out_of_step() == ["w"]
    assert rig.replica.offer(snapshot(4, 40), 0.0).reason == "duplicate"
    assert rig.replica.offer(snapshot(8, 80, 81), 0.0).ok
    assert rig.holds(80, 81, 9)
    assert rig.replica.out_of_step() == []


def test_too_many_batches_beyond_a_hole_are_not_kept_but_not_forgotten(rig: Rig) -> None:
    last = PENDING_LIMIT + 10
    for seq in range(2, last + 1):
        rig.replica.offer(batch(seq), 0.0)
    followed = rig.replica.get("w")
    assert len(followed.pending) == PENDING_LIMIT
    rig.replica.offer(batch(1), 0.0)
    assert rig.replica.out_of_step() == ["w"], "the last ones are missing"
    rig.replica.offer(snapshot(last, 5), 0.0)
    assert rig.replica.out_of_step() == []
    assert followed.pending == {}


def test_other_epochs_and_strangers_change_nothing(rig: Rig) -> None:
    assert rig.replica.offer(batch(1, epoch=6), 0.0).reason == "old_epoch"
    assert rig.replica.offer(batch(1, epoch=8), 0.0).reason == "old_epoch"
    assert rig.replica.offer(batch(1, worker="x"), 0.0).reason == "unknown_worker"
    assert rig.holds()
    assert (rig.stats.old_epochs, rig.stats.unknown_workers) == (2, 1)


def test_a_new_epoch_begins_from_nothing(rig: Rig) -> None:
    rig.replica.offer(batch(1), 0.0)
    again = WorkerInfo("w", 8, "http://w", ("m",))
    rig.index.join("w", 8, 1)
    rig.replica.follow(again)
    assert rig.replica.resume_after("w") is None
    assert rig.replica.offer(batch(2), 0.0).reason == "old_epoch"
    assert rig.replica.offer(batch(1, epoch=8), 0.0).ok
    assert rig.replica.resume_after("w") == (8, 1)


def test_lost_last_batches_are_noticed_from_the_registration(rig: Rig) -> None:
    rig.replica.offer(batch(1), 0.0)
    rig.replica.registered("w", 7, 3, 10.0)
    rig.replica.registered("w", 7, 3, 10.0 + TAIL_LOST_S / 2)
    assert rig.replica.out_of_step() == []
    rig.replica.registered("w", 7, 3, 10.1 + TAIL_LOST_S)
    assert rig.replica.out_of_step() == ["w"]
    assert rig.stats.gaps == 1


def test_a_registration_ahead_of_a_log_that_flows_is_no_loss(rig: Rig) -> None:
    now = 0.0
    for seq in range(1, 40):
        rig.replica.offer(batch(seq), now)
        rig.replica.registered("w", 7, seq + 1, now)
        now += 0.5
    assert rig.stats.gaps == 0


def test_a_registration_before_any_contents_says_how_far_they_must_reach(rig: Rig) -> None:
    rig.replica.registered("w", 7, 5, 0.0)
    rig.replica.offer(snapshot(3, 1), 0.0)
    assert rig.replica.out_of_step() == ["w"]
    for seq in (4, 5):
        rig.replica.offer(batch(seq), 0.0)
    assert rig.replica.out_of_step() == []


def test_trust_names_its_reason(rig: Rig) -> None:
    assert rig.trust() == (Trust.LEARNED, "no snapshot yet")
    rig.replica.offer(snapshot(0), 0.0)
    assert rig.trust() == (Trust.LEARNED, "event feed is silent")
    rig.replica.heard_http("w", 1.0)
    assert rig.trust(2.0) == (Trust.EXACT, "events from the worker")
    assert rig.trust(1.0 + SILENT_S)[0] is Trust.LEARNED
    rig.replica.redis_at = 20.0
    assert rig.trust(20.0)[0] is Trust.LEARNED, "the log is read, but it is not registered"
    rig.replica.registered("w", 7, 0, 20.0)
    assert rig.trust(21.0) == (Trust.EXACT, "events through redis")
    rig.replica.offer(batch(2), 21.0)
    assert rig.trust(21.0) == (Trust.LEARNED, "gap in its events")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"prefix_cache": False}, (Trust.BLIND, "prefix cache is off")),
        ({"event_feed": False}, (Trust.LEARNED, "no event feed")),
    ],
)
def test_trust_without_a_feed(changes, expected) -> None:
    rig = Rig(WorkerInfo("w", 7, "http://w", ("m",), **changes))
    assert rig.trust() == expected
    assert rig.replica.out_of_step() == ([] if "event_feed" in changes else ["w"])


@settings(max_examples=150 * DEPTH, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 12), min_size=1, max_size=4)),
        max_size=30,
    ),
    data=st.data(),
)
def test_any_delivery_ends_in_the_truth(operations, data) -> None:
    """Lost, doubled, reordered: after one snapshot the index is what the worker holds."""
    rig = Rig()
    truth: set[int] = set()
    states = [set(truth)]
    batches = []
    for seq, (stores, keys) in enumerate(operations, 1):
        unique = list(dict.fromkeys(keys))
        event = stored(unique, None) if stores else removed(unique)
        truth = truth | set(unique) if stores else truth - set(unique)
        states.append(set(truth))
        batches.append(batch(seq, event))
    order = data.draw(st.lists(st.sampled_from(batches), max_size=60)) if batches else []
    for item in order:
        rig.replica.offer(item, 0.0)
        followed = rig.replica.get("w")
        if followed.position is not None:
            assert rig.holds(*states[followed.position]), "never anything but some true state"
    rig.replica.offer(snapshot(len(batches), *truth), 0.0)
    assert rig.holds(*truth)
    assert rig.replica.out_of_step() == []


def large(seq: int, count: int) -> EventBatch:
    return snapshot(seq, *range(100, 100 + count))


def test_large_contents_are_taken_in_by_pieces_and_batches_wait(rig: Rig) -> None:
    rig.replica.offer(batch(1), 0.0)
    steps = rig.replica.restore(large(5, 3 * PIECE_KEYS), 0.0)
    assert next(steps).reason == "restoring"
    assert rig.index.blocks("w") == PIECE_KEYS
    assert rig.trust(0.0)[0] is Trust.LEARNED
    # A removal that overtakes the piece with its key must not be lost.
    last = 100 + 3 * PIECE_KEYS - 1
    assert rig.replica.offer(batch(6, removed([last])), 0.0).reason == "gap"
    again = list(rig.replica.restore(large(5, 3 * PIECE_KEYS), 0.0))
    assert [step.ok for step in again] == [False], "one at a time"
    *_, end = steps
    assert end == Applied(True, "applied")
    assert rig.index.blocks("w") == 3 * PIECE_KEYS - 1
    assert not rig.index.match([last])
    assert rig.replica.resume_after("w") == (7, 6)
    # And again: the pieces go on counting.
    *_, end = rig.replica.restore(large(9, 2 * PIECE_KEYS), 0.0)
    assert end.ok
    assert rig.index.blocks("w") == 2 * PIECE_KEYS


@pytest.mark.parametrize("on_device", [0, 10, 2 * PIECE_KEYS])
def test_large_contents_of_host_memory_come_by_pieces_too(rig: Rig, on_device: int) -> None:
    device, host = range(1, 1 + on_device), range(10_000, 10_000 + 3 * PIECE_KEYS)
    tiers = (Snapshot(pack_keys(device)), Snapshot(pack_keys(host), Tier.HOST))
    rig.replica.offer(batch(1, stored([5, 9_999], None, Tier.HOST)), 0.0)
    *_, end = rig.replica.restore(batch(5, *tiers), 0.0)
    assert end == Applied(True, "applied")
    assert rig.index.blocks("w") == on_device
    assert rig.index.blocks("w", Tier.HOST) == 3 * PIECE_KEYS
    assert not rig.index.match([BlockKey(9_999)])
    assert rig.replica.offer(batch(6, removed(list(host), Tier.HOST)), 0.0).ok
    assert rig.index.blocks("w", Tier.HOST) == 0


def test_contents_left_half_way_are_asked_for_again(rig: Rig) -> None:
    steps = rig.replica.restore(large(5, 3 * PIECE_KEYS), 0.0)
    next(steps)
    steps.close()
    assert rig.replica.resume_after("w") is None
    assert rig.replica.out_of_step() == ["w"]
    *_, end = rig.replica.restore(large(5, 3 * PIECE_KEYS), 0.0)
    assert end.ok
    assert rig.index.blocks("w") == 3 * PIECE_KEYS


def test_a_worker_that_restarts_meanwhile_gets_nothing_of_its_old_contents(rig: Rig) -> None:
    steps = rig.replica.restore(large(5, 3 * PIECE_KEYS), 0.0)
    next(steps)
    rig.index.join("w", 8, 1)
    rig.replica.follow(WorkerInfo("w", 8, "http://w", ("m",)))
    *_, end = steps
    assert not end.ok
    assert rig.index.blocks("w") == 0
    assert rig.replica.resume_after("w") is None


def test_small_and_foreign_contents_go_the_short_way(rig: Rig) -> None:
    assert [step.reason for step in rig.replica.restore(large(5, 10), 0.0)] == ["applied"]
    assert [step.reason for step in rig.replica.restore(large(4, 5000), 0.0)] == ["duplicate"]
    old = snapshot(9, *range(5000), epoch=6)
    assert [step.reason for step in rig.replica.restore(old, 0.0)] == ["old_epoch"]
    assert rig.index.blocks("w") == 10
