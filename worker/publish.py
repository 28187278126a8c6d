"""Publishing to Redis: a lease that is renewed each second, a log of event batches, checkpoints.

    heartbeat    HSET worker hash (all of it), PEXPIRE, members, log and checkpoint lifetimes
    batch        XADD log, one field, in the order of their numbers; PEXPIRE log
    checkpoint   16 strings of packed keys per tier, and the manifest that says up to which batch
                 they hold

Redis may be absent, frozen, flushed or read-only at any time. Serving never waits for it: this is
one task with a link of its own, it reads from :class:`~worker.eventlog.EventLog`, and what
it could not send is either still in that log or contained in the checkpoint written on its return.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import msgspec
import structlog

from shared import rediskeys
from shared.blocks import pack_keys
from shared.errors import ApiError, InternalError
from shared.load import WorkerInfo, WorkerLoad
from shared.rediskeys import Command, RedisKeys
from shared.redislink import RedisLink, RedisLost
from shared.settings import RedisConfig
from worker.eventlog import Contents, EventLog

GATHER_S = 0.005
"""Batches that follow each other this closely share one round trip."""
XADDS_PER_TRIP = 200
BACKLOG_LIMIT = 2_000
"""After an outage, more batches than this are skipped: the checkpoint contains them."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
OUTAGES = (RedisLost, ApiError)
"""Redis failed, or (``ApiError``) the engine cannot say what it holds."""


@dataclass(frozen=True, slots=True)
class Published:
    """What the publisher asks its worker for. The plain calls return at once."""

    info: Callable[[], WorkerInfo]
    load: Callable[[], WorkerLoad]
    contents: Callable[[], Awaitable[Contents]]
    alive: Callable[[], bool]
    """False lets the lease run out."""


def cut_chunks(keys: list[int]) -> list[bytes]:
    """Sorted packed keys in ``CHUNKS`` strings by their top bits."""
    keys = sorted(keys)
    width = (1 << 64) // rediskeys.CHUNKS
    edges = [bisect_left(keys, width * chunk) for chunk in range(rediskeys.CHUNKS)]
    edges.append(len(keys))
    return [pack_keys(keys[a:b]) for a, b in pairwise(edges)]


class RedisPublisher:
    """One worker incarnation's writer. ``start`` it in the event loop, ``close`` it once."""

    def __init__(
        self,
        config: RedisConfig,
        names: RedisKeys,
        log: EventLog,
        published: Published,
        *,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._names, self._log, self._published = names, log, published
        self._link = RedisLink(config.url, config.timeout_ms / 1000, "headwater-worker")
        self._clock, self._rng = clock, rng
        self._task: asyncio.Task[None] | None = None
        self._up: bool | None = None
        self._sent = 0
        self._checkpoint_seq = -1
        self._with_host = False
        """Whether the checkpoint has chunks of host memory."""
        self._checkpoint_at = 0.0
        self._shard = names.shard_of(log.worker)
        self._logger = structlog.get_logger("worker.publish")

    @property
    def up(self) -> bool:
        """Whether the last exchange with Redis worked."""
        return self._up is True

    def start(self) -> None:
        """Begin publishing in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="redis-publisher")
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop, and take the lease back if Redis answers within its time limit."""
        task, self._task = self._task, None
        while task is not None and not task.done():
            # More than once: a library may swallow a cancellation.
            task.cancel()
            await asyncio.wait((task,), timeout=0.05)
        if not self.up:
            return
        try:
            await self._withdraw()
        except OUTAGES as error:
            self._logger.warning("redis_lease_left_to_expire", reason=str(error)[:200])
        finally:
            await self._link.drop()

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._log.closed:
            try:
                await self._come_back()
                pause = FIRST_PAUSE_S
                await self._follow()
            except OUTAGES as error:
                self._note(up=False, reason=f"{type(error).__name__}: {error}"[:200])
            finally:
                await self._link.drop()
            # Jitter: a fleet must not return in step after an outage.
            await asyncio.sleep(pause * (0.5 + self._rng.random() / 2))
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _come_back(self) -> None:
        """First exchange of a connection: everything is written anew, then the backlog."""
        await self._beat()
        seq = await self._checkpoint()
        backlog = self._log.seq - self._sent
        if backlog > BACKLOG_LIMIT or self._log.since(self._sent, 1) is None:
            self._sent = seq
        self._note(up=True)

    async def _follow(self) -> None:
        beat_at = self._clock() + rediskeys.HEARTBEAT_S
        while not self._log.closed:
            if await self._log.wait_beyond(self._sent, max(0.0, beat_at - self._clock())):
                await asyncio.sleep(GATHER_S)
                await self._send()
            if self._clock() < beat_at:
                continue
            beat_at = self._clock() + rediskeys.HEARTBEAT_S
            whole = await self._beat()
            age = self._clock() - self._checkpoint_at
            stale = self._log.seq != self._checkpoint_seq and age >= rediskeys.CHECKPOINT_EVERY_S
            if not whole:
                self._logger.info("redis_checkpoint_missing", worker=self._log.worker)
            if stale or not whole:
                await self._checkpoint()

    async def _send(self) -> None:
        entries = self._log.since(self._sent, XADDS_PER_TRIP)
        if entries is None:
            self._sent = await self._checkpoint()
            return
        stream, limit = self._names.log(self._shard), ("MAXLEN", "~", rediskeys.LOG_MAXLEN)
        commands: list[Command] = [
            ("XADD", stream, *limit, "*", rediskeys.FIELD_BATCH, entry.data) for entry in entries
        ]
        # This may have made it, and the next beat may not come.
        commands.append(("PEXPIRE", stream, rediskeys.LOG_TTL_MS))
        for reply in await self._link.call(commands):
            if isinstance(reply, Exception):
                # Out of memory, no permission: the readers will notice the gap.
                raise RedisLost(f"XADD: {reply}")
        self._sent = entries[-1].seq

    async def _beat(self) -> bool:
        """Renew the lease; returns whether the checkpoint is still all there."""
        if not self._published.alive():
            raise InternalError("the engine is not able to serve")
        worker, epoch = self._log.worker, self._log.epoch
        fields: list[str | bytes | int] = [
            *(rediskeys.FIELD_INFO, msgspec.json.encode(self._published.info())),
            *(rediskeys.FIELD_LOAD, msgspec.json.encode(self._published.load())),
            *(rediskeys.FIELD_EPOCH, int(epoch)),
            *(rediskeys.FIELD_SEQ, self._log.seq),
            *(rediskeys.FIELD_SCHEMA, rediskeys.SCHEMA),
        ]
        name, members = self._names.worker(worker), self._names.members(self._shard)
        kept = self._checkpoint_keys()
        commands: list[Command] = [
            ("HSET", name, *fields),
            ("PEXPIRE", name, rediskeys.LEASE_MS),
            ("SADD", members, worker),
            ("PEXPIRE", members, rediskeys.LOG_TTL_MS),
            ("PEXPIRE", self._names.log(self._shard), rediskeys.LOG_TTL_MS),
            *(("PEXPIRE", key, rediskeys.CHECKPOINT_TTL_MS) for key in kept),
        ]
        replies = await self._link.transact(commands)
        return all(replies[-len(kept) :])

    async def _checkpoint(self) -> int:
        """Write the whole contents; returns the number of the last batch they include."""
        contents = await self._published.contents()
        # Sorting 100k keys takes tens of milliseconds: not on the loop that relays tokens.
        chunks = await asyncio.to_thread(cut_chunks, contents.keys)
        self._with_host = bool(contents.host_keys)
        if self._with_host:
            chunks += await asyncio.to_thread(cut_chunks, contents.host_keys)
        *names, manifest = self._checkpoint_keys()
        # All of them: keys are hashes, so any change touches most chunks; and a chunk left
        # alone because "it is there" would be a hole if the server was swapped meanwhile.
        commands: list[Command] = [
            ("SET", name, chunk, "PX", rediskeys.CHECKPOINT_TTL_MS)
            for name, chunk in zip(names, chunks, strict=True)
        ]
        state: list[str | int] = [
            *(rediskeys.FIELD_EPOCH, int(self._log.epoch)),
            *(rediskeys.FIELD_SEQ, contents.seq),
            *(rediskeys.FIELD_HOST, int(self._with_host)),
        ]
        commands += [
            ("HSET", manifest, *state),
            ("PEXPIRE", manifest, rediskeys.CHECKPOINT_TTL_MS),
        ]
        await self._link.transact(commands)
        self._checkpoint_seq, self._checkpoint_at = contents.seq, self._clock()
        return contents.seq

    async def _withdraw(self) -> None:
        await self._link.transact(
            [
                ("DEL", self._names.worker(self._log.worker)),
                ("SREM", self._names.members(self._shard), self._log.worker),
                ("UNLINK", *self._checkpoint_keys()),
            ]
        )

    def _checkpoint_keys(self) -> list[str]:
        worker, epoch = self._log.worker, self._log.epoch
        chunks = [self._names.chunk(worker, epoch, index) for index in range(rediskeys.CHUNKS)]
        if self._with_host:
            host = self._names.host_chunk
            chunks += [host(worker, epoch, index) for index in range(rediskeys.CHUNKS)]
        return [*chunks, self._names.manifest(worker, epoch)]

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A publisher that died of something else than Redis must not do so in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._up = False
            self._logger.error("redis_publisher_ended", reason=repr(error))

    def _note(self, *, up: bool, reason: str = "") -> None:
        """One line per change of state, not one per failed try."""
        if self._up is not up:
            if up:
                self._logger.info("redis_up", worker=self._log.worker)
            else:
                self._logger.warning("redis_down", worker=self._log.worker, reason=reason)
        self._up = up
