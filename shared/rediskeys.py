"""Every Redis key, field and lifetime. All objects are disposable: each carries a TTL.

Versions that share one Redis (docs/upgrading.md): a change that older readers survive leaves
``SCHEMA`` alone (a new key, a new field, an element at the end of an array); any other raises it,
and readers then know two numbers.

A worker's keys share one hash tag ``{deployment.shard}``, so no command crosses a Cluster slot and
no slot is hot; the shard is chosen by the worker's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import xxhash

from shared.types import Epoch, WorkerId

Command = tuple[str | bytes | int | float, ...]
Reply = Any
"""Raw RESP2: bytes, int, None, lists of these, or an exception object."""

SCHEMA = 1
"""What writers say of the form of all that they write; a writer that says nothing means 1."""
LEASE_MS = 5_000
"""A worker that has not beaten for this long is gone."""
HEARTBEAT_S = 1.0
CHECKPOINT_TTL_MS = 60_000
CHECKPOINT_EVERY_S = 30.0
LOG_MAXLEN = 20_000
LEARNED_MAXLEN = 500
"""Facts about workers without events kept per shard: a gateway that starts learns from them."""
LOG_TTL_MS = 600_000
BOOKING_TTL_MS = 2_000
GAVE_TTL_MS = 3_600_000
LEDGER_TTL_MS = 7 * 86_400_000
LEDGER_FIELD = "l"
"""Of the ledger's stream: one line."""
CHUNKS = 16
"""A checkpoint is cut into this many strings by the top bits of the key."""

FIELD_INFO = "info"
FIELD_LOAD = "load"
FIELD_EPOCH = "epoch"
FIELD_SEQ = "seq"
FIELD_BATCH = "b"
FIELD_SCHEMA = "schema"
FIELD_HOST = "host"
"""In a manifest: "1" if chunks of host memory belong to the checkpoint."""


@dataclass(frozen=True, slots=True)
class RedisKeys:
    """Key names of one deployment."""

    deployment: str
    shards: int = 16

    def shard_of(self, worker: WorkerId) -> int:
        """Shard of a worker, the same in every process."""
        return xxhash.xxh3_64_intdigest(worker.encode()) % self.shards

    def _tag(self, shard: int) -> str:
        return f"hw:{{{self.deployment}.{shard}}}"

    @staticmethod
    def shard_in(name: bytes) -> int:
        """Shard of a key that was named by :meth:`log` or :meth:`learned`."""
        return int(name.rpartition(b"}")[0].rpartition(b".")[2])

    def members(self, shard: int) -> str:
        """SET of worker ids of a shard; healed by each heartbeat."""
        return f"{self._tag(shard)}:members"

    def worker(self, worker: WorkerId) -> str:
        """HASH info, load, epoch; rewritten whole by each heartbeat, expires after a lease."""
        return f"{self._tag(self.shard_of(worker))}:w:{worker}"

    def log(self, shard: int) -> str:
        """STREAM of event batches of a shard's workers."""
        return f"{self._tag(shard)}:log"

    def learned(self, shard: int) -> str:
        """STREAM of what gateways tell about a shard's workers that publish no events."""
        return f"{self._tag(shard)}:learned"

    def manifest(self, worker: WorkerId, epoch: Epoch) -> str:
        """HASH epoch, seq, host: up to which batch the chunks are complete, and of what tiers."""
        return f"{self._tag(self.shard_of(worker))}:ck:{worker}:{epoch}:m"

    def chunk(self, worker: WorkerId, epoch: Epoch, chunk: int) -> str:
        """STRING of packed keys whose top bits are ``chunk``."""
        return f"{self._tag(self.shard_of(worker))}:ck:{worker}:{epoch}:{chunk}"

    def host_chunk(self, worker: WorkerId, epoch: Epoch, chunk: int) -> str:
        """As :meth:`chunk`, for keys in host memory; there only if there are such keys."""
        return f"{self._tag(self.shard_of(worker))}:ck:{worker}:{epoch}:h{chunk}"

    def bookings(self, gateway: str) -> str:
        """STRING: the work one gateway has booked, by worker."""
        return f"hw:{{{self.deployment}.g}}:load:{gateway}"

    def offered(self, gateway: str) -> str:
        """STRING: the prefill that one gateway sends to workers of late, per second."""
        return f"hw:{{{self.deployment}.g}}:offered:{gateway}"

    def ledger(self) -> str:
        """STREAM of ledger lines of all gateways, where it is asked for."""
        return f"hw:{{{self.deployment}.g}}:ledger"

    def limits(self, tenant: str) -> str:
        """HASH: what a tenant has used of its limits, and how much runs at each gateway."""
        return f"hw:{{{self.deployment}.t.{tenant}}}:limits"

    def gave(self, mark: str) -> str:
        """STRING: the worker that gave a response; ``mark`` is a hash of its tenant and id."""
        return f"hw:{{{self.deployment}.r.{mark[:2]}}}:gave:{mark}"

    def drains(self) -> str:
        """HASH: what operators said of draining, by worker."""
        return f"hw:{{{self.deployment}.g}}:drains"

    def gateways(self) -> str:
        """SET of gateway ids that share bookings; in the same slot as their values."""
        return f"hw:{{{self.deployment}.g}}:gateways"
