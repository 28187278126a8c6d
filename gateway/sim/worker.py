"""A simulated worker: the real block pool, and time in place of tensors.

Prefills run one at a time in the order of arrival; one that finds no memory, or too many decodes,
holds up those behind it. What is cached is decided when a prefill begins. Its blocks can be found
once it has ended, and those of the answer when the request has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gateway.sim.model import WorkerModel, cached_tokens
from gateway.sim.trace import TraceRequest
from shared.blocks import GRANULE, stride_of
from shared.events import CacheEvent, EventBatch, Snapshot
from shared.load import WorkerLoad
from shared.paging import BlockPool
from shared.types import BlockKey, Epoch, WorkerId

EPOCH = Epoch(1)
_ROOT = b""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its worker."""

    number: int
    request: TraceRequest
    blocks: list[int] = field(default_factory=list)
    """All that it holds: the prompt's, the answer's, and a partial one at the end."""
    matched: int = 0
    """How many of them were cached."""
    cached_tokens: int = 0
    expected_tokens: int = 0
    """To compute, as it looked when the request arrived."""


def granule_keys(path: tuple[int, ...], block_size: int) -> list[BlockKey]:
    """One key per full granule of the prompt, as the gateway would hash them."""
    parts = -(-block_size // GRANULE)
    if block_size % GRANULE == 0:
        return [BlockKey(block * parts + part) for block in path for part in range(parts)]
    keys = []
    for end in range(GRANULE, len(path) * block_size + 1, GRANULE):
        place, part = divmod(end - 1, block_size)
        keys.append(BlockKey(path[place] * parts + part // GRANULE))
    return keys


class SimWorker:
    """Blocks, queue and decodes of one worker; whoever owns the clock says when things end."""

    def __init__(self, worker: WorkerId, model: WorkerModel, block_size: int) -> None:
        self.id = worker
        self._model = model
        self._block_size = block_size
        self._pool = BlockPool(model.kv_blocks, block_size)
        self._queue: deque[Job] = deque()
        self._queued_tokens = 0
        self._prefilling: Job | None = None
        self._prefill_ends = 0.0
        self._running = 0
        self._seq = 0
        self.busy_s = 0.0
        """Seconds spent in prefill so far."""
        self.served = 0
        """Requests that were sent here."""

    def put(self, job: Job) -> None:
        """A request arrives."""
        self.served += 1
        job.expected_tokens = self._missing(job.request)
        self._queued_tokens += job.expected_tokens
        self._queue.append(job)

    def begin_prefill(self, now: float) -> tuple[Job, float] | None:
        """Start the next prefill if one can start: its job and the seconds it takes."""
        if self._prefilling or not self._queue or self._running >= self._model.max_running:
            return None
        job = self._queue[0]
        request = job.request
        found = self._pool.match(_ROOT, [_unit(block) for block in request.path])
        tokens = request.input_tokens + request.output_tokens
        needed = -(-tokens // self._block_size) - len(found)
        if needed > self._pool.available - self._pool.n_cached_of(found):
            return None
        self._queue.popleft()
        self._queued_tokens -= job.expected_tokens
        self._pool.acquire(found)
        job.matched = len(found)
        job.blocks = found + (self._pool.allocate(needed) or [])
        job.cached_tokens = cached_tokens(len(found), self._block_size, request.input_tokens)
        took = self._model.prefill_s(
            request.input_tokens - job.cached_tokens, request.input_tokens, self._running
        )
        self._prefilling, self._prefill_ends = job, now + took
        self.busy_s += took
        return job, took

    def end_prefill(self, job: Job) -> float:
        """The first token is out; returns the seconds until the answer is complete."""
        self._seal(job, job.matched, job.request.path)
        self._prefilling = None
        self._running += 1
        return self._model.decode_s(job.request.output_tokens, self._running)

    def finish(self, job: Job) -> None:
        """The answer is complete: everything is given back, full blocks stay reusable."""
        self._seal(job, len(job.request.path), job.request.path + job.request.answer)
        self._pool.release(job.blocks)
        self._running -= 1

    def load(self, now: float) -> WorkerLoad:
        """What it would tell in a heartbeat."""
        queued = self._queued_tokens
        if self._prefilling is not None:
            rest = max(0.0, self._prefill_ends - now)
            queued += int(rest * self._model.prefill_tokens_per_s)
        return WorkerLoad(
            running=self._running,
            waiting=len(self._queue) + (self._prefilling is not None),
            queued_prefill_tokens=queued,
            blocks_total=self._pool.n_blocks,
            blocks_used=self._pool.n_used,
            blocks_cached=self._pool.n_cached,
            prefill_tokens_per_s=self._model.prefill_tokens_per_s,
            decode_tokens_per_s=1.0 / self._model.decode_s(1, max(1, self._running)),
        )

    def drain(self, now: float) -> EventBatch | None:
        """Cache events since the last call; None if there are none."""
        events = self._pool.drain_events()
        return self._batch(events, now) if events else None

    def snapshot(self) -> EventBatch:
        """The batch with which it comes in, holding nothing."""
        return self._batch([Snapshot(b"")], 0.0)

    def check(self) -> None:
        """Prove the pool's invariants; raises AssertionError. O(pool): for tests."""
        self._pool.check()

    @property
    def announced(self) -> int:
        """Keys that its events so far add up to."""
        return len(self._pool.snapshot_keys())

    @property
    def idle(self) -> bool:
        """Nothing waits, is computed or held."""
        return not self._queue and self._prefilling is None and self._pool.n_used == 0

    def _batch(self, events: list[CacheEvent], now: float) -> EventBatch:
        self._seq += 1
        stride = stride_of(self._block_size)
        return EventBatch(self.id, EPOCH, "worker", self._seq, now, stride, tuple(events))

    def _missing(self, request: TraceRequest) -> int:
        found = self._pool.match(_ROOT, [_unit(block) for block in request.path])
        tokens = request.input_tokens
        return tokens - cached_tokens(len(found), self._block_size, tokens)

    def _seal(self, job: Job, start: int, path: tuple[int, ...]) -> None:
        """Make the blocks of ``path`` from ``start`` on findable."""
        for at in range(start, len(path)):
            parent = job.blocks[at - 1] if at else None
            job.blocks[at] = self._pool.seal(
                job.blocks[at], _ROOT, parent, _unit(path[at]), self._key(path[at], at)
            )

    def _key(self, block: int, at: int) -> BlockKey | None:
        """The key that announces a block: its last granule's, if it ends with one."""
        end = (at + 1) * self._block_size
        if end % (stride_of(self._block_size) * GRANULE):
            return None
        parts = -(-self._block_size // GRANULE)
        return BlockKey(block * parts + (self._block_size - 1) // GRANULE)


def _unit(block: int) -> bytes:
    return block.to_bytes(8, "little")
