"""Cache events: what a worker tells about its KV cache, and their encoding (msgpack).

A batch belongs to one (worker, epoch, source) and carries a sequence number that grows by one per
batch from 1. A receiver that sees a gap asks for a :class:`Snapshot`. A block is announced only
after its KV has been computed, and its ancestors are announced before it. One that moves to another
tier is removed from the one and stored on the other in the same batch.
"""

from __future__ import annotations

from array import array

import msgspec

from shared.blocks import pack_keys, unpack_keys
from shared.types import Epoch, Tier, WorkerId


class BlocksStored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """Consecutive index keys of one chain, in depth order; on other tiers than the device any keys,
    in any order."""

    packed_keys: bytes
    parent: int | None = None
    """Key before the first of ``keys``; None at the root of a scope, and on other tiers."""
    tier: Tier = Tier.GPU

    @property
    def keys(self) -> array[int]:
        """The keys as unsigned 64-bit integers."""
        return unpack_keys(self.packed_keys)


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed", array_like=True):
    """Keys that are gone from ``tier``, in any order."""

    packed_keys: bytes
    tier: Tier = Tier.GPU

    @property
    def keys(self) -> array[int]:
        """The keys as unsigned 64-bit integers."""
        return unpack_keys(self.packed_keys)


class CacheCleared(msgspec.Struct, frozen=True, tag="cleared", array_like=True):
    """Everything is gone, from all tiers."""


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", array_like=True):
    """The whole contents of ``tier`` as of the batch's ``seq``; replaces what the receiver knew.

    That of the device comes first in its batch and empties the other tiers, whose own may follow.
    """

    packed_keys: bytes
    tier: Tier = Tier.GPU

    @property
    def keys(self) -> array[int]:
        """The keys as unsigned 64-bit integers."""
        return unpack_keys(self.packed_keys)


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared | Snapshot


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one engine step, in order."""

    worker: WorkerId
    epoch: Epoch
    source: str
    """Who wrote it: ``"worker"`` for the worker's own pool, else a gateway that learned it."""
    seq: int
    at: float
    """The writer's wall clock, seconds. For display only: never compared with another clock."""
    stride: int
    """Granules per key (``shared.blocks.stride_of``)."""
    events: tuple[CacheEvent, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EventBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """msgpack form."""
    return _ENCODER.encode(batch)


def decode_batch(data: bytes) -> EventBatch:
    """Inverse of :func:`encode_batch`; raises ``msgspec.DecodeError`` on anything else."""
    return _DECODER.decode(data)


def stored(keys: list[int], parent: int | None, tier: Tier = Tier.GPU) -> BlocksStored:
    """A :class:`BlocksStored` from integers."""
    return BlocksStored(pack_keys(keys), parent, tier)


def removed(keys: list[int], tier: Tier = Tier.GPU) -> BlocksRemoved:
    """A :class:`BlocksRemoved` from integers."""
    return BlocksRemoved(pack_keys(keys), tier)
