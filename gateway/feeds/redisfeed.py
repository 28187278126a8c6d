"""Following the shared log, and taking a worker's contents from its checkpoint.

One task follows all shards' streams, over one connection per server. It begins a little further
back than a checkpoint can be old, so that checkpoint and log always meet; what both contain is
skipped by its sequence number. A stream id is only a place to read on from: whether something is
missing is judged by the sequence numbers alone (``gateway.index.replica``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import Any

import structlog

from gateway.feeds.retrying import Backoff
from gateway.index.base import Applied
from gateway.index.redis import (
    LogEntry,
    checkpoint_commands,
    entries_per_shard,
    id_order,
    is_replica,
    look_commands,
    lookback_id,
    parse_checkpoint,
    parse_entries,
    parse_last_id,
    poll_commands,
    read_command,
    server_time_s,
)
from gateway.index.replica import Replica
from gateway.index.stats import FeedStats
from shared.blocks import stride_of
from shared.events import EventBatch
from shared.rediskeys import RedisKeys
from shared.redislink import RedisLink, RedisLost
from shared.types import WorkerId

BLOCK_S = 0.2
"""A read waits this long for news; a worker that joins is caught up with after it."""
POLL_S = 0.025
"""Pause between two reads of a Cluster's logs: no command can wait for several servers."""
GATHER_S = 0.02
"""A single server that had news is read again so much later: a read wakes at the first entry, and
those of one prompt follow each other by some milliseconds."""
CHECK_EVERY_S = 1.0
SLICE_S = 0.002
"""Longest turn on the event loop while batches are applied."""
JUMP_LAG_S = 10.0
"""A log that is read this late is skipped; contents then come from checkpoints and workers."""
CAUGHT_UP_S = 1.0
RELOAD_S = 1.0
"""A checkpoint that did not help is not read again sooner."""
JITTER_S = 0.1


async def take_in(replica: Replica, batch: EventBatch, now: float) -> Applied:
    """Offer a batch, with turns for others in between if it is a large one."""
    applied = Applied(False)
    with closing(replica.restore(batch, now)) as steps:
        for applied in steps:
            if applied.reason == "restoring":
                await asyncio.sleep(0)
    return applied


@dataclass(eq=False)
class _Reader:
    """Takes what is in Redis into the replica, over a connection of its own."""

    _link: RedisLink
    _keys: RedisKeys
    _replica: Replica
    _stats: FeedStats
    _clock: Callable[[], float]
    _rng: Random


@dataclass(eq=False)
class LogFollower(_Reader):
    """Reads the log of all shards that have a worker into the replica, for ever."""

    _cursors: dict[int, bytes] = field(default_factory=dict, init=False)
    _rewind: set[int] = field(default_factory=set, init=False)
    _catching_up: set[int] = field(default_factory=set, init=False)
    """Shards that are read from far back: their age says nothing about how we keep up."""
    _offsets_s: dict[int, float] = field(default_factory=dict, init=False)
    """By shard: its server's clock minus ours, at the last look."""
    _checked_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._log: Any = structlog.get_logger("gateway.feeds")

    def rewind(self, worker: WorkerId) -> None:
        """Read a worker's shard from before its last checkpoint: it was not known until now."""
        self._rewind.add(self._keys.shard_of(worker))

    async def run(self) -> None:
        """Follow; after an error begin again on a new connection, from the same place."""
        backoff = Backoff(self._rng)
        while True:
            try:
                await self._look_around()
                backoff.reset()
                while True:
                    await self._read()
                    if self._rewind or self._clock() - self._checked_at >= CHECK_EVERY_S:
                        await self._look_around()
            except RedisLost:
                # The poll of the registrations tells about outages; here it is enough to go on.
                await backoff.pause()
            finally:
                await self._link.drop()

    async def _look_around(self) -> None:
        """The server's clock and role, and whether our place in each stream still exists."""
        [role] = await self._link.call([("ROLE",)])
        if is_replica(role) and not self._link.cluster:
            raise RedisLost("it is a replica now")
        shards = self._shards()
        commands, places = look_commands(self._keys, shards)
        replies = await self._link.call(commands, at=places) if commands else []
        try:
            clocks = dict(zip(shards, map(server_time_s, replies[::2]), strict=True))
        except ValueError as error:
            raise RedisLost(str(error)) from error
        self._checked_at = self._replica.redis_at = self._clock()
        for shard, reply in zip(shards, replies[1::2], strict=True):
            self._offsets_s[shard] = clocks[shard] - self._clock()
            cursor, last = self._cursors.get(shard), parse_last_id(reply)
            if cursor is not None and last is not None and id_order(cursor) > id_order(last):
                # Another log than the one we were reading: a failover, or a flush and a clock that
                # went back. What was missed shows as a gap.
                self._rewind.add(shard)
                self._stats.cursor_resets += 1
                self._log.info("redis_log_changed", shard=shard)
        rewound = self._rewind & clocks.keys()
        self._cursors |= {shard: lookback_id(clocks[shard]) for shard in rewound}
        self._catching_up |= rewound
        self._rewind -= rewound

    def _shards(self) -> list[int]:
        """Those with a worker that publishes events; new ones are to be read from far back."""
        publish = (followed.info for followed in self._replica if followed.info.event_feed)
        shards = {self._keys.shard_of(info.id) for info in publish}
        self._cursors = {s: cursor for s, cursor in self._cursors.items() if s in shards}
        self._rewind = (self._rewind & shards) | (shards - self._cursors.keys())
        return sorted(shards)

    async def _read(self) -> None:
        if not self._cursors:
            await asyncio.sleep(BLOCK_S)
            return
        entries = await self._next()
        self._replica.redis_at = self._clock()
        if not entries:
            self._stats.index_lag_s = 0.0
            self._catching_up.clear()
            if self._link.cluster:
                await asyncio.sleep(POLL_S)
            return
        for entry in entries:
            self._cursors[entry.shard] = entry.id
        await self._apply(entries)
        self._note_lag(entries)
        counts = Counter(entry.shard for entry in entries)
        more = max(counts.values()) >= entries_per_shard(len(self._cursors))
        if not more:
            await asyncio.sleep(POLL_S if self._link.cluster else GATHER_S)

    async def _next(self) -> list[LogEntry]:
        """What follows the cursors; a single server is waited for."""
        if self._link.cluster:
            replies = await self._link.call(poll_commands(self._keys, self._cursors))
        else:
            command = read_command(self._keys, self._cursors, int(BLOCK_S * 1000))
            replies = await self._link.call([command], wait_s=BLOCK_S)
        for reply in replies:
            if isinstance(reply, Exception):
                raise RedisLost(f"XREAD: {reply}")
        return [entry for reply in replies for entry in parse_entries(self._keys, reply)]

    async def _apply(self, entries: list[LogEntry]) -> None:
        turn = self._clock()
        for entry in entries:
            now = self._clock()
            if now - turn > SLICE_S:
                await asyncio.sleep(0)
                turn = now = self._clock()
            batch = entry.batch()
            if batch is None:
                self._stats.decode_errors += 1
            else:
                self._replica.offer(batch, now)

    def _note_lag(self, entries: list[LogEntry]) -> None:
        newest = {entry.shard: entry.written_s for entry in entries}
        now = {shard: self._clock() + self._offsets_s.get(shard, 0.0) for shard in newest}
        ages = {shard: max(0.0, now[shard] - written) for shard, written in newest.items()}
        self._catching_up -= {shard for shard, age in ages.items() if age < CAUGHT_UP_S}
        late = [age for shard, age in ages.items() if shard not in self._catching_up]
        self._stats.index_lag_s = max(late, default=0.0)
        if self._stats.index_lag_s > JUMP_LAG_S:
            # Chasing costs more than starting over. What is missing then shows as a gap.
            self._cursors |= {s: b"%d-0" % int((t - CAUGHT_UP_S) * 1000) for s, t in now.items()}
            self._stats.cursor_resets += 1
            self._log.warning("redis_log_skipped", lag_s=round(self._stats.index_lag_s, 1))


@dataclass(eq=False)
class CheckpointLoader(_Reader):
    """Takes contents from checkpoints, one worker after the other, each at most once at a time."""

    _tried_at: dict[WorkerId, float] = field(default_factory=dict, init=False)
    _wanted: asyncio.Queue[WorkerId] = field(default_factory=asyncio.Queue, init=False)
    _queued: set[WorkerId] = field(default_factory=set, init=False)
    insufficient: set[WorkerId] = field(default_factory=set, init=False)
    """Workers whose checkpoint did not close their gap: ask themselves."""

    def want(self, worker: WorkerId) -> None:
        """Ask for a worker's checkpoint; a repeated wish is one wish, and soon after it none."""
        tried_at = self._tried_at.get(worker)
        if worker in self._queued or worker in self.insufficient:
            return
        if tried_at is None or self._clock() - tried_at >= RELOAD_S:
            self._queued.add(worker)
            self._wanted.put_nowait(worker)

    def settled(self, worker: WorkerId) -> None:
        """The worker is in step again, or gone."""
        self.insufficient.discard(worker)
        self._tried_at.pop(worker, None)

    async def run(self) -> None:
        """Serve wishes for ever."""
        try:
            while True:
                worker = await self._wanted.get()
                try:
                    await self._load(worker)
                except RedisLost:
                    self.insufficient.add(worker)
                finally:
                    self._queued.discard(worker)
        finally:
            await self._link.drop()

    async def _load(self, worker: WorkerId) -> None:
        followed = self._replica.get(worker)
        if followed is None:
            return
        if followed.position is not None:
            # All gateways see the same gap at the same moment.
            await asyncio.sleep(self._rng.random() * JITTER_S)
        self._tried_at[worker] = self._clock()
        info = followed.info
        replies = await self._link.call(checkpoint_commands(self._keys, worker, info.epoch))
        checkpoint = parse_checkpoint(replies, info.epoch)
        if checkpoint is not None:
            batch = checkpoint.as_batch(worker, info.epoch, stride_of(info.block_size))
            if (await take_in(self._replica, batch, self._clock())).reason == "applied":
                self._stats.checkpoint_resyncs += 1
        followed = self._replica.get(worker)
        if followed is None or followed.in_step:
            return
        if checkpoint is None or followed.pending:
            # The log has gone on beyond the gap, so only the worker itself can close it.
            self.insufficient.add(worker)
