"""One worker's event streams, and how far what they told is all that it holds. Without I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.engines.base import Engine, FeedPlan
from gateway.engines.keymap import KeyMap
from gateway.engines.ranks import RankMerge
from gateway.feeds.zmqstream import RankStream
from shared.blocks import Scope
from shared.events import CacheEvent, EventBatch
from shared.load import WorkerInfo
from shared.types import Epoch, WorkerId

UNKNOWN_PAST = "what it stored before is not known"
MANY_RANKS = "several ranks behind one address: only what all of them hold counts"


@dataclass(slots=True, eq=False)
class Rank:
    """One stream and what its events mean."""

    number: int
    stream: RankStream
    keys: KeyMap
    complete: bool = False
    """All that it holds has been told."""
    why: str = UNKNOWN_PAST
    """Why not all has been told."""
    abandoned: int = 0
    """Orphans that were given up, as seen last."""
    stored_before: int = 0
    """Blocks that had been stored when contents became unknown."""
    unknown: int = 0
    """Events of kinds that are not known here, so far."""


@dataclass(slots=True, eq=False)
class Following:
    """One worker's streams, for one incarnation after the other."""

    worker: WorkerId
    engine: Engine
    plan: FeedPlan
    tokenizer: str
    epoch: Epoch
    seq: int = 0
    at: float = 0.0
    ranks: list[Rank] = field(default_factory=list)
    merge: RankMerge | None = None

    def begin(self, info: WorkerInfo, key_map: Callable[[], KeyMap]) -> None:
        """A new incarnation: nothing of it is known."""
        self.epoch, self.seq = info.epoch, 0
        ranks = len(self.ranks)
        self.merge = RankMerge(ranks) if ranks > 1 else None
        for rank in self.ranks:
            rank.keys = key_map()
            rank.complete, rank.why, rank.abandoned, rank.stored_before = False, UNKNOWN_PAST, 0, 0

    def merged(self, rank: Rank, events: list[CacheEvent]) -> list[CacheEvent]:
        """What events of one rank mean for the worker as a whole."""
        return events if self.merge is None else self.merge.merge(rank.number, events)

    def number(self, events: tuple[CacheEvent, ...], stride: int) -> EventBatch:
        """The next batch of this incarnation."""
        self.seq += 1
        return EventBatch(
            worker=self.worker,
            epoch=self.epoch,
            source="worker",
            seq=self.seq,
            at=self.at,
            stride=stride,
            events=events,
        )

    def doubt(self) -> str:
        """Why what was told is perhaps not all that it holds; empty: it is."""
        if self._away():
            return f"nobody publishes at {self.plan.endpoints[0]}"
        if part := [rank for rank in self.ranks if not rank.complete]:
            return part[0].why
        return MANY_RANKS if self.merge is not None else ""

    def recalls(self) -> bool:
        """It is there, and more has yet to be told than its new events."""
        return not self._away() and any(not rank.complete for rank in self.ranks)

    def _away(self) -> bool:
        return any(not rank.stream.connected for rank in self.ranks)


def root_of(info: WorkerInfo, adapter: str, salt: str, hash_key: bytes) -> bytes | None:
    """Root of the hash chain of a worker's prompts; None: it has no such adapter."""
    scope = ""
    if adapter:
        known = next((one for one in info.adapters if one.name == adapter), None)
        if known is None:
            return None
        scope = known.scope
    model = info.models[0] if info.models else ""
    return Scope(model, info.tokenizer, adapter=scope, salt=salt).root(hash_key)
