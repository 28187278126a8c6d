"""Numbering, replay and waiting of the event log; the cut of a checkpoint."""

from __future__ import annotations

import asyncio

import pytest

from shared.blocks import unpack_keys
from shared.events import EventBatch, Snapshot, decode_batch, removed, stored
from shared.types import Epoch, WorkerId
from worker import routes_native
from worker.eventlog import Contents, EventLog, make_epoch
from worker.publish import cut_chunks


def make_log(max_batches: int = 100, max_bytes: int = 1 << 20) -> EventLog:
    return EventLog(
        WorkerId("w"), Epoch(7), 2, wall=lambda: 5.0, max_batches=max_batches, max_bytes=max_bytes
    )


def batches(log: EventLog, after: int) -> list[EventBatch]:
    entries = log.since(after)
    assert entries is not None
    return [decode_batch(entry.data) for entry in entries]


def test_batches_count_from_one_and_empty_ones_do_not_count() -> None:
    log = make_log()
    log.append([])
    assert log.seq == 0
    log.append([stored([1, 2], None)])
    log.append([removed([2]), stored([3], 1)])
    first, second = batches(log, 0)
    assert (first.seq, second.seq, log.seq) == (1, 2, 2)
    assert (first.worker, first.epoch, first.source, first.stride) == ("w", 7, "worker", 2)
    assert second.events == (removed([2]), stored([3], 1))
    assert batches(log, 1) == [second]
    assert log.since(2) == []


def test_a_position_that_is_gone_or_from_the_future_is_none() -> None:
    log = make_log(max_batches=3)
    for key in range(5):
        log.append([stored([key], None)])
    assert log.since(1) is None
    assert [entry.seq for entry in log.since(2) or []] == [3, 4, 5]
    assert [entry.seq for entry in log.since(2, limit=2) or []] == [3, 4]
    assert log.since(6) is None
    assert log.since(-1) is None


def test_memory_is_bounded_in_bytes_too() -> None:
    log = make_log(max_bytes=2_000)
    for _ in range(50):
        log.append([stored(list(range(100)), None)])
    assert log.since(47) is None
    assert len(log.since(48) or []) == 2


def test_snapshot_carries_its_position() -> None:
    batch = decode_batch(make_log().snapshot(Contents(4, [9, 2**64 - 1])))
    assert batch.seq == 4
    (snapshot,) = batch.events
    assert isinstance(snapshot, Snapshot)
    assert list(snapshot.keys) == [9, 2**64 - 1]


async def test_waiters_wake_from_another_thread() -> None:
    log = make_log()
    log.attach(asyncio.get_running_loop())
    assert not await log.wait_beyond(0, 0.0)
    waiters = [asyncio.create_task(log.wait_beyond(0, 5.0)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.to_thread(log.append, [stored([1], None)])
    assert await asyncio.gather(*waiters) == [True] * 3
    assert await log.wait_beyond(0, 0.0)


async def test_closing_sends_waiters_home() -> None:
    log = make_log()
    waiter = asyncio.create_task(log.wait_beyond(0, 5.0))
    await asyncio.sleep(0)
    log.close()
    assert await waiter is False
    assert log.closed


def test_epochs_keep_start_and_randomness() -> None:
    assert make_epoch(5, 0x1ABCD) == 5 << 16 | 0xABCD
    far_future_ms = 10_000_000_000_000
    assert make_epoch(far_future_ms, 0xFFFF) < 2**63


def test_chunks_are_sorted_and_cut_by_the_top_bits() -> None:
    keys = [2**64 - 1, 0, 2**60 - 1, 2**60, 5]
    chunks = cut_chunks(keys)
    assert len(chunks) == 16
    assert list(unpack_keys(chunks[0])) == [0, 5, 2**60 - 1]
    assert list(unpack_keys(chunks[1])) == [2**60]
    assert list(unpack_keys(chunks[15])) == [2**64 - 1]
    assert chunks[2] == b""
    assert keys[0] == 2**64 - 1


class Written:
    """What a feed wrote, write by write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.writes.append(data)


async def test_batches_that_follow_each_other_closely_are_one_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, written, over = make_log(), Written(), asyncio.Event()
    log.attach(asyncio.get_running_loop())
    paused = asyncio.Event()

    async def pause(_seconds: float) -> None:
        paused.set()
        await over.wait()

    monkeypatch.setattr(routes_native, "pause", pause)
    routes = routes_native.NativeRoutes(None)  # type: ignore[arg-type]
    feed = asyncio.create_task(routes._feed(log, written, 0))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    log.append([stored([1], None)])
    await paused.wait()
    log.append([stored([2], 1)])
    assert written.writes == []
    over.set()
    while not written.writes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    entries = log.since(0)
    assert entries is not None
    assert written.writes == [routes_native.frames(entry.data for entry in entries)]
    log.close()
    await feed
