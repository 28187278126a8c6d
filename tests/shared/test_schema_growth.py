"""Versions that differ by a field or an element read each other: what stands in Redis can grow.

The shapes here are those of the first version, written down anew, so that a change of the real ones
that older readers would not survive fails here (and then raises ``rediskeys.SCHEMA``).
"""

from __future__ import annotations

import msgspec
import pytest

from shared.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EventBatch,
    Snapshot,
    decode_batch,
    encode_batch,
)
from shared.load import WorkerInfo, WorkerLoad
from shared.types import Epoch, WorkerId

KEYS = bytes(range(16))


class OldStored(msgspec.Struct, tag="stored", array_like=True):
    packed_keys: bytes
    parent: int | None = None


class OldRemoved(msgspec.Struct, tag="removed", array_like=True):
    packed_keys: bytes


class OldCleared(msgspec.Struct, tag="cleared", array_like=True):
    pass


class OldSnapshot(msgspec.Struct, tag="snapshot", array_like=True):
    packed_keys: bytes


class OldBatch(msgspec.Struct, array_like=True):
    worker: str
    epoch: int
    source: str
    seq: int
    at: float
    stride: int
    events: tuple[OldStored | OldRemoved | OldCleared | OldSnapshot, ...]


class OldInfo(msgspec.Struct):
    id: str
    epoch: int
    url: str
    models: tuple[str, ...]
    engine: str
    block_size: int
    blocks_total: int
    tokenizer: str


class OldLoad(msgspec.Struct):
    running: int
    waiting: int
    queued_prefill_tokens: int
    draining: bool
    uptime_s: float


OLD = OldBatch(
    "w", 5, "worker", 3, 1.5, 1,
    (OldStored(KEYS, 7), OldRemoved(KEYS), OldCleared(), OldSnapshot(KEYS)),
)  # fmt: skip
NEW = EventBatch(
    WorkerId("w"), Epoch(5), "worker", 3, 1.5, 1,
    (BlocksStored(KEYS, 7), BlocksRemoved(KEYS), CacheCleared(), Snapshot(KEYS)),
)  # fmt: skip


def test_batches_of_the_first_version_are_read() -> None:
    assert decode_batch(msgspec.msgpack.encode(OLD)) == NEW


def test_the_first_version_reads_batches_of_this_one() -> None:
    assert msgspec.msgpack.decode(encode_batch(NEW), type=OldBatch) == OLD


@pytest.mark.parametrize(("mine", "old"), [(WorkerInfo, OldInfo), (WorkerLoad, OldLoad)])
def test_registrations_of_either_version_are_read_by_the_other(mine: type, old: type) -> None:
    info = WorkerInfo(WorkerId("w"), Epoch(5), "http://w:1", ("m",), blocks_total=4, tokenizer="t")
    new = info if mine is WorkerInfo else WorkerLoad(running=2, waiting=1, uptime_s=3.5)
    seen = msgspec.json.decode(msgspec.json.encode(new), type=old)
    for name in old.__struct_fields__:
        assert getattr(seen, name) == getattr(new, name)
    assert msgspec.json.decode(msgspec.json.encode(seen), type=mine) == new
