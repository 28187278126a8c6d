"""The worker's cache events, numbered, with a bounded memory for readers that fall behind.

    engine thread:  append(events)                 -> seq grows by one per batch, from 1
    event loop:     wait_beyond(seq), since(seq)   -> each reader keeps its own position

Readers never slow the engine down: there is one shared buffer and no queue per reader. A reader
whose position has left the buffer takes a snapshot instead. The number keeps counting whether
anybody reads or not, so "nothing was missed" can be decided from numbers alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from shared.blocks import pack_keys
from shared.events import CacheEvent, EventBatch, Snapshot, encode_batch
from shared.types import Epoch, Tier, WorkerId

SOURCE = "worker"
"""Who writes these batches, as receivers see it."""


def make_epoch(start_ms: int, random16: int) -> Epoch:
    """One incarnation: start in milliseconds of wall time, and 16 random bits; 57 bits in all.

    With microseconds it would not fit the 64 bits of a msgpack integer.
    """
    return Epoch(start_ms << 16 | random16 & 0xFFFF)


@dataclass(frozen=True, slots=True)
class Entry:
    """One encoded batch."""

    seq: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Contents:
    """All index keys of the cache just after the batch ``seq``, in any order."""

    seq: int
    keys: list[int]
    host_keys: list[int] = field(default_factory=list)
    """Those in host memory."""


class EventLog:
    """Numbering, encoding and replay of one worker incarnation's batches."""

    def __init__(
        self,
        worker: WorkerId,
        epoch: Epoch,
        stride: int,
        *,
        wall: Callable[[], float],
        max_batches: int = 8192,
        max_bytes: int = 32 << 20,
    ) -> None:
        self.worker, self.epoch, self.stride = worker, epoch, stride
        self._wall = wall
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._lock = Lock()
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._seq = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._closed = False

    @property
    def seq(self) -> int:
        """Number of the newest batch; 0 before the first."""
        return self._seq

    @property
    def closed(self) -> bool:
        """Whether readers should leave."""
        return self._closed

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop whose readers are woken; call before the first :meth:`append`."""
        self._loop = loop

    def append(self, events: Sequence[CacheEvent]) -> None:
        """Number and keep one batch. Engine thread only; never blocks on a reader."""
        if not events:
            return
        with self._lock:
            seq = self._seq + 1
            data = encode_batch(self._batch(seq, tuple(events)))
            self._entries.append(Entry(seq, data))
            self._bytes += len(data)
            while len(self._entries) > self._max_batches or (
                self._bytes > self._max_bytes and len(self._entries) > 1
            ):
                self._bytes -= len(self._entries.popleft().data)
            self._seq = seq
        # A waiter enters the set before it looks at seq once more, so none can be overlooked here.
        if self._waiters and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake)

    def since(self, seq: int, limit: int = 256) -> list[Entry] | None:
        """The batches after ``seq``, oldest first, at most ``limit``; None if some are gone.

        A ``seq`` from the future (another incarnation's number) is "gone" as well.
        """
        with self._lock:
            if seq > self._seq or seq < 0:
                return None
            if seq == self._seq:
                return []
            first = self._entries[0].seq
            if seq + 1 < first:
                return None
            start = seq + 1 - first
            return [self._entries[i] for i in range(start, min(start + limit, len(self._entries)))]

    def snapshot(self, contents: Contents) -> bytes:
        """Encoded batch that says: as of ``contents.seq`` the cache holds exactly these keys."""
        tiers = [Snapshot(pack_keys(contents.keys))]
        if contents.host_keys:
            tiers.append(Snapshot(pack_keys(contents.host_keys), Tier.HOST))
        return encode_batch(self._batch(contents.seq, tuple(tiers)))

    async def wait_beyond(self, seq: int, timeout_s: float) -> bool:
        """Whether a batch after ``seq`` exists, waiting up to ``timeout_s`` for it."""
        if self._seq > seq or self._closed:
            return self._seq > seq
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            if self._seq <= seq:
                async with asyncio.timeout(timeout_s):
                    await waiter
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(waiter)
        return self._seq > seq

    def close(self) -> None:
        """Let every reader leave. Event loop only."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _batch(self, seq: int, events: tuple[CacheEvent, ...]) -> EventBatch:
        return EventBatch(self.worker, self.epoch, SOURCE, seq, self._wall(), self.stride, events)
