"""The index's layout in Redis, as values: which commands to send, what their replies mean.

Pure: a link elsewhere carries the commands. Names and lifetimes are in ``shared.rediskeys``; why
the layout is as it is, is told in ``docs/adr/0003-index-in-redis.md``. Every command touches the
keys of one shard only, except the stream read of a single server, which waits for all shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from shared.events import EventBatch, Snapshot, decode_batch
from shared.load import WorkerInfo, WorkerLoad
from shared.rediskeys import (
    CHECKPOINT_EVERY_S,
    CHUNKS,
    FIELD_BATCH,
    FIELD_EPOCH,
    FIELD_HOST,
    FIELD_INFO,
    FIELD_LOAD,
    FIELD_SCHEMA,
    FIELD_SEQ,
    SCHEMA,
    Command,
    RedisKeys,
    Reply,
)
from shared.types import Epoch, Tier, WorkerId

WORKER_SOURCE = "worker"
ENTRIES_PER_READ = 256
"""Over all streams of one read, at most."""
LOOKBACK_MS = int((CHECKPOINT_EVERY_S + 5.0) * 1000)
"""A checkpoint is at most this old, so a log read from here closes the distance to it."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker wrote into Redis with its last heartbeat."""

    info: WorkerInfo
    load: WorkerLoad | None
    epoch: Epoch
    seq: int
    """Last batch it had published."""
    raw_load: bytes = b""
    """As written: differs from the one before if the worker has beaten since."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of a stream, not yet decoded."""

    shard: int
    id: bytes
    fields: Reply

    @property
    def written_s(self) -> float:
        """When the server took it, in its own clock."""
        return id_order(self.id)[0] / 1000.0

    def value(self) -> bytes:
        """What was written; empty if there is something else."""
        if not isinstance(self.fields, list):
            return b""
        values = dict(zip(self.fields[::2], self.fields[1::2], strict=False))
        found: bytes = values.get(FIELD_BATCH.encode(), b"")
        return found

    def batch(self) -> EventBatch | None:
        """The batch in it; None if there is something else."""
        try:
            return decode_batch(self.value())
        except (msgspec.DecodeError, RecursionError):
            return None


def id_order(entry_id: bytes) -> tuple[int, int]:
    """Sort key of a stream id."""
    high, _, low = entry_id.partition(b"-")
    return int(high), int(low or 0)


def lookback_id(server_time_s: float) -> bytes:
    """Where a gateway without a cursor begins to read, given the server's clock."""
    return b"%d-0" % max(0, int(server_time_s * 1000) - LOOKBACK_MS)


def server_time_s(reply: Reply) -> float:
    """``TIME`` as seconds; raises ``ValueError`` for an error reply."""
    if not isinstance(reply, list):
        raise ValueError(f"TIME answered {reply!r}")
    return int(reply[0]) + int(reply[1]) / 1e6


def members_commands(keys: RedisKeys) -> list[Command]:
    """One command per shard for the names of all workers."""
    return [("SMEMBERS", keys.members(shard)) for shard in range(keys.shards)]


def parse_members(replies: Iterable[Reply]) -> list[WorkerId]:
    """Names, sorted; an error reply counts as an empty set."""
    names: set[WorkerId] = set()
    for reply in replies:
        if isinstance(reply, list):
            names.update(WorkerId(name.decode("utf-8", "replace")) for name in reply)
    return sorted(names)


def registration_commands(keys: RedisKeys, workers: Iterable[WorkerId]) -> list[Command]:
    """One command per worker for its registration."""
    return [("HGETALL", keys.worker(worker)) for worker in workers]


def parse_registration(reply: Reply) -> Registration | None:
    """None: no lease.

    :raises msgspec.DecodeError: something else than a registration is there.
    """
    if not isinstance(reply, list) or not reply:
        return None
    fields: Mapping[bytes, bytes] = dict(zip(reply[::2], reply[1::2], strict=False))
    _require_known_schema(fields)
    info = msgspec.json.decode(fields.get(FIELD_INFO.encode(), b""), type=WorkerInfo)
    raw_load = fields.get(FIELD_LOAD.encode(), b"")
    try:
        epoch = Epoch(int(fields.get(FIELD_EPOCH.encode(), info.epoch)))
        seq = int(fields.get(FIELD_SEQ.encode(), 0))
    except ValueError as error:
        raise msgspec.DecodeError("epoch and seq must be numbers") from error
    load = msgspec.json.decode(raw_load, type=WorkerLoad) if raw_load else None
    return Registration(info, load, epoch, seq, raw_load)


def _require_known_schema(fields: Mapping[bytes, bytes]) -> None:
    """To understand half of what a newer form says would be worse than to understand none of it."""
    told = fields.get(FIELD_SCHEMA.encode(), b"1")
    try:
        schema = int(told)
    except ValueError as error:
        raise msgspec.DecodeError("schema must be a number") from error
    if schema > SCHEMA:
        raise msgspec.DecodeError(f"schema {schema} is newer than {SCHEMA}: update this gateway")


def checkpoint_commands(keys: RedisKeys, worker: WorkerId, epoch: Epoch) -> list[Command]:
    """Manifest, all chunks, manifest again: unchanged in between means they belong together."""
    manifest: Command = (
        "HMGET",
        keys.manifest(worker, epoch),
        FIELD_EPOCH,
        FIELD_SEQ,
        FIELD_HOST,
    )
    chunks = [keys.chunk(worker, epoch, chunk) for chunk in range(CHUNKS)]
    chunks += [keys.host_chunk(worker, epoch, chunk) for chunk in range(CHUNKS)]
    return [manifest, ("MGET", *chunks), manifest]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A worker's contents as of a batch, as it was found in Redis."""

    seq: int
    packed_keys: bytes
    packed_host_keys: bytes = b""

    def as_batch(self, worker: WorkerId, epoch: Epoch, stride: int) -> EventBatch:
        """The snapshot that an index applies."""
        tiers = [Snapshot(self.packed_keys)]
        if self.packed_host_keys:
            tiers.append(Snapshot(self.packed_host_keys, Tier.HOST))
        return EventBatch(worker, epoch, WORKER_SOURCE, self.seq, 0.0, stride, tuple(tiers))


def parse_checkpoint(replies: Sequence[Reply], epoch: Epoch) -> Checkpoint | None:
    """None: there is none for this epoch, a part has expired, or it changed while it was read."""
    before, chunks, after = replies
    if not isinstance(before, list) or not isinstance(chunks, list) or before != after:
        return None
    try:
        found_epoch, seq = int(before[0]), int(before[1])
    except (TypeError, ValueError):
        return None
    # Writers store every chunk, empty ones too: a missing one has expired or was evicted.
    wanted = chunks if before[2] == b"1" else chunks[:CHUNKS]
    if found_epoch != epoch or any(chunk is None or len(chunk) % 8 for chunk in wanted):
        return None
    return Checkpoint(seq, b"".join(wanted[:CHUNKS]), b"".join(wanted[CHUNKS:]))


def entries_per_shard(shards: int) -> int:
    """How many one read of so many shards takes of each, at most."""
    return max(1, ENTRIES_PER_READ // shards)


def poll_commands(keys: RedisKeys, cursors: Mapping[int, bytes]) -> list[Command]:
    """What follows the cursors, one command per shard: in a Cluster they are on several servers."""
    count = entries_per_shard(len(cursors))
    return [
        ("XREAD", "COUNT", count, "STREAMS", keys.log(shard), cursor)
        for shard, cursor in cursors.items()
    ]


def read_command(keys: RedisKeys, cursors: Mapping[int, bytes], block_ms: int) -> Command:
    """Wait for what follows the cursors of the given shards."""
    names = tuple(keys.log(shard) for shard in cursors)
    count = entries_per_shard(len(cursors))
    head: Command = ("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS")
    return (*head, *names, *cursors.values())


def parse_entries(keys: RedisKeys, reply: Reply) -> list[LogEntry]:
    """Entries of an ``XREAD`` reply, stream by stream, oldest first."""
    if not isinstance(reply, list):
        return []
    return [
        LogEntry(keys.shard_in(name), entry_id, fields)
        for name, rows in reply
        for entry_id, fields in rows
    ]


def forget_member_command(keys: RedisKeys, worker: WorkerId) -> Command:
    """Take a name without a lease out of its set; a worker that lives adds itself again."""
    return ("SREM", keys.members(keys.shard_of(worker)), worker)


def look_commands(keys: RedisKeys, shards: Iterable[int]) -> tuple[list[Command], dict[int, str]]:
    """Server's clock and stream of each of the shards, and the keys whose servers' clocks are
    meant."""
    commands: list[Command] = []
    places: dict[int, str] = {}
    for shard in shards:
        places[len(commands)] = keys.log(shard)
        commands += [("TIME",), ("XINFO", "STREAM", keys.log(shard))]
    return commands, places


def parse_last_id(reply: Reply) -> bytes | None:
    """``last-generated-id`` of a stream; None if there is no such stream."""
    if not isinstance(reply, list):
        return None
    found: bytes | None = dict(zip(reply[::2], reply[1::2], strict=False)).get(b"last-generated-id")
    return found


def is_replica(reply: Reply) -> bool:
    """Reads ``ROLE``. A server that does not tell (no permission) is taken for a master."""
    return isinstance(reply, list) and bool(reply) and reply[0] == b"slave"
