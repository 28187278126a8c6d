"""The prefix index: which worker holds which prefix. One contract suite runs all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from shared.events import EventBatch
from shared.types import BlockKey, Epoch, Tier, WorkerId


class Match(msgspec.Struct, frozen=True):
    """How much of a prompt a worker holds, counted from its first token; a hole ends it."""

    tokens: int
    """On any tier; a multiple of the worker's stride in tokens, > 0."""
    host_tokens: int = 0
    """The part of them that begins with the first block that is not on the device."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a batch."""

    ok: bool
    """False: there is a gap (or no snapshot yet); the caller must fetch a snapshot."""
    reason: str = ""
    """``applied``, ``duplicate``, ``gap``, ``old_epoch``, ``unknown_worker``, ``wrong_stride``."""


class Learned(msgspec.Struct, frozen=True):
    """What answered requests changed of what a worker holds, in this order. Whole beginnings of
    prompts stay. It is made in this process, so nothing can be missed, and it is not numbered."""

    cleared: bool = False
    """All of it is gone."""
    lost: Collection[int] = ()
    """Gone as well, as an answer showed."""
    stored: Collection[int] = ()
    """New; none of them in ``evicted``."""
    evicted: Collection[int] = ()
    """Too old to be believed any longer."""


class Contents(Protocol):
    """What was learned of one worker: whole beginnings of prompts, kept where they are learned."""

    @property
    def entries(self) -> int:
        """Keys held."""
        ...

    def depth(self, keys: Sequence[int]) -> int:
        """How many of a prompt's first keys, of the worker's stride, are held. Pure."""
        ...

    def shed(self, count: int) -> None:
        """Give up so many of the keys that were used longest ago."""
        ...

    def clear(self) -> None:
        """All of it is gone."""
        ...


class PrefixIndex(Protocol):
    """Synchronous and in process: remote state is followed by a feed that calls :meth:`apply`."""

    def join(self, worker: WorkerId, epoch: Epoch, stride: int, *, closed: bool = False) -> None:
        """Make room for a worker. A new epoch empties what was known; the same epoch is a no-op.

        :param closed: after each batch the worker holds whole beginnings of prompts only. Look-ups
            may rely on it until a hole is seen.
        """
        ...

    def apply(self, batch: EventBatch) -> Applied:
        """Mutates. Batches of one (worker, epoch, source) count up by one from 1."""
        ...

    def attach(self, worker: WorkerId, contents: Contents) -> None:
        """What is learned of a worker is found here, in place of what its events said, until it is
        forgotten or tells again itself, which clears ``contents``. An unknown worker's is not.
        Mutates."""
        ...

    def learn(self, worker: WorkerId, change: Learned) -> None:
        """What was learned of a worker has changed; of an unknown one it is dropped. What is new is
        taken in and what is gone leaves, what its events said included; contents that are attached
        have changed already. Mutates."""
        ...

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker and all it held; O(1) for the caller. Unknown workers are fine."""
        ...

    def match(self, keys: Sequence[BlockKey]) -> Mapping[WorkerId, Match]:
        """Workers that hold a prefix of ``keys`` (one per granule), without zeros. Pure."""
        ...

    def blocks(self, worker: WorkerId, tier: Tier = Tier.GPU) -> int:
        """Index entries of one worker and tier."""
        ...

    def position(self, worker: WorkerId, source: str = "worker") -> tuple[Epoch, int] | None:
        """Epoch and last applied sequence number; None if no snapshot or batch has been applied."""
        ...

    def tidy(self, budget: int) -> bool:
        """Postponed clean-up of at most ``budget`` entries; True: call again, some is left."""
        ...
