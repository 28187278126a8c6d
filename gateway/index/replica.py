"""Keeps the index in step with the workers' event sequences, whatever road the batches take.

Pure: time is an argument. Continuity is judged per (worker, epoch) by sequence numbers only, never
by the road (stream ids, connections), so that batches may arrive twice, by two roads, or late:

    position   last batch applied             None: nothing is known yet
    target     last batch known to exist      position < target: there is a hole, the worker needs
                                              a checkpoint, a replay or a snapshot
    pending    batches beyond a hole          applied as soon as the hole is closed

A worker is *exact* while it is in step and one of its roads is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import msgspec

from gateway.index.base import Applied
from gateway.index.redis import WORKER_SOURCE
from gateway.index.stats import FeedStats
from gateway.routing.base import Trust
from shared.events import BlocksStored, EventBatch, Snapshot
from shared.load import WorkerInfo
from shared.types import Epoch, Tier, WorkerId

SILENT_S = 5.0
"""A feed without a sign of life for this long is not believed any more."""
TAIL_LOST_S = 1.5
"""A registration may be ahead of the log this long before its last batches count as lost."""
PENDING_LIMIT = 4096
"""Batches kept beyond a hole, per worker."""
PIECE_KEYS = 1024
"""Whole contents are taken in by this many keys at a time: the loop that does it relays answers."""
PIECE_SOURCE = "worker-contents"
"""Source under which the pieces after the first reach the index, numbered by themselves."""

Apply = Callable[[EventBatch, float], Applied]


def starts_anew(batch: EventBatch) -> bool:
    """The batch carries the whole contents and needs no predecessor."""
    first = batch.events[0] if batch.events else None
    return isinstance(first, Snapshot) and first.tier is Tier.GPU


@dataclass(slots=True)
class Followed:
    """What is known of one worker's sequence."""

    info: WorkerInfo
    position: int | None = None
    target: int = 0
    pending: dict[int, EventBatch] = field(default_factory=dict)
    redis_at: float | None = None
    """Last time its registration was seen in Redis."""
    http_at: float | None = None
    """Last frame of its own feed, keep-alives included."""
    ahead: tuple[int, float] | None = None
    """Sequence number that its registration named beyond our position, and since when."""
    restoring: bool = False
    """Its whole contents are being taken in; what arrives meanwhile waits in ``pending``."""
    pieces: int = 0
    doubt: str = ""
    """Why its contents are known in part only, though its events are followed."""

    @property
    def in_step(self) -> bool:
        """Everything that is known to exist has been applied."""
        if self.restoring or self.position is None:
            return False
        return self.position >= self.target


class Replica:
    """All workers' sequences; applies batches through ``apply`` and counts in ``stats``."""

    def __init__(self, apply: Apply, stats: FeedStats) -> None:
        self._apply = apply
        self._stats = stats
        self._followed: dict[WorkerId, Followed] = {}
        self.redis_at: float | None = None
        """Last time the log was read without error (monotonic seconds)."""

    def __iter__(self) -> Iterator[Followed]:
        return iter(self._followed.values())

    def get(self, worker: WorkerId) -> Followed | None:
        """One worker's state."""
        return self._followed.get(worker)

    def follow(self, info: WorkerInfo) -> None:
        """A worker has joined. A new epoch begins from nothing; the same one goes on."""
        known = self._followed.get(info.id)
        if known is not None and known.info.epoch == info.epoch:
            known.info = info
            return
        self._followed[info.id] = Followed(info)

    def start_over(self, worker: WorkerId) -> None:
        """What was applied of a worker is gone: only its whole contents will do."""
        known = self._followed.get(worker)
        if known is not None:
            anew = self._followed[worker] = Followed(known.info)
            anew.redis_at, anew.target = known.redis_at, known.target

    def forget(self, worker: WorkerId) -> None:
        """A worker has left. Unknown ones are fine."""
        self._followed.pop(worker, None)

    def resume_after(self, worker: WorkerId) -> tuple[Epoch, int] | None:
        """From where a replay would do; None: only the whole contents will."""
        followed = self._followed.get(worker)
        if followed is None or followed.position is None:
            return None
        return followed.info.epoch, followed.position

    def offer(self, batch: EventBatch, now: float) -> Applied:
        """Take a batch from any road. Not ok: it was not applied now (kept, if it lies ahead)."""
        followed = self._followed.get(batch.worker)
        if followed is None:
            self._stats.unknown_workers += 1
            return Applied(False, "unknown_worker")
        if batch.epoch != followed.info.epoch:
            self._stats.old_epochs += 1
            return Applied(False, "old_epoch")
        if batch.source != WORKER_SOURCE:
            # Continuity of what other gateways learned is the index's own business.
            return self._apply(batch, now)
        if followed.position is not None and batch.seq <= followed.position:
            self._stats.duplicates += 1
            return Applied(True, "duplicate")
        if followed.restoring:
            self._note_hole(followed, batch)
            return Applied(False, "gap")
        return self._advance(followed, batch, now)

    def restore(self, batch: EventBatch, now: float) -> Generator[Applied, None, None]:
        """As :meth:`offer`, but large contents are applied piece by piece, one per step.

        The last value is the verdict. Close it if it is left early: the worker then counts as
        unknown again.
        """
        followed = self._followed.get(batch.worker)
        pieces = _cut(batch)
        if (
            followed is None
            or len(pieces) < 2
            or followed.restoring
            or batch.epoch != followed.info.epoch
            or batch.seq <= (-1 if followed.position is None else followed.position)
        ):
            yield self.offer(batch, now)
            return
        first = self._apply(pieces[0], now)
        if not first.ok:
            self._note_hole(followed, batch)
            yield first
            return
        followed.restoring, followed.position = True, None
        try:
            for piece in pieces[1:]:
                yield Applied(False, "restoring")
                if self._followed.get(batch.worker) is not followed:
                    yield Applied(False, "unknown_worker")
                    return
                followed.pieces += 1
                self._apply(msgspec.structs.replace(piece, seq=followed.pieces), now)
            self._moved_to(followed, batch.seq)
        finally:
            followed.restoring = False
        self._catch_up(followed, now)
        yield Applied(True, "applied")

    def _advance(self, followed: Followed, batch: EventBatch, now: float) -> Applied:
        expected = 1 if followed.position is None else followed.position + 1
        applied = Applied(False, "gap")
        if starts_anew(batch) or batch.seq == expected:
            applied = self._apply(batch, now)
        if not applied.ok:
            self._note_hole(followed, batch)
            return applied
        self._moved_to(followed, batch.seq)
        self._catch_up(followed, now)
        return applied

    def _note_hole(self, followed: Followed, batch: EventBatch) -> None:
        if followed.in_step:
            self._stats.gaps += 1
        followed.target = max(followed.target, batch.seq)
        if len(followed.pending) < PENDING_LIMIT:
            followed.pending[batch.seq] = batch

    def _moved_to(self, followed: Followed, seq: int) -> None:
        self._stats.batches += 1
        followed.position = seq
        followed.target = max(followed.target, seq)
        followed.pending.pop(seq, None)

    def _catch_up(self, followed: Followed, now: float) -> None:
        """Apply what had arrived beyond the hole, as far as it is contiguous now."""
        while followed.pending and followed.position is not None:
            batch = followed.pending.get(followed.position + 1)
            if batch is None or not self._apply(batch, now).ok:
                break
            self._moved_to(followed, batch.seq)
        if followed.pending and followed.position is not None:
            position = followed.position
            followed.pending = {s: b for s, b in followed.pending.items() if s > position}

    def registered(self, worker: WorkerId, epoch: Epoch, seq: int, now: float) -> None:
        """A registration in Redis names the last batch; notice if its like never arrives."""
        followed = self._followed.get(worker)
        if followed is None or followed.info.epoch != epoch:
            return
        followed.redis_at = now
        if followed.position is None:
            followed.target = max(followed.target, seq)
            return
        if seq <= followed.position:
            followed.ahead = None
            return
        if followed.ahead is None or followed.ahead[0] <= followed.position:
            followed.ahead = (seq, now)
        elif now - followed.ahead[1] > TAIL_LOST_S:
            self._stats.gaps += followed.in_step
            followed.target = max(followed.target, followed.ahead[0])
            followed.ahead = None

    def heard_http(self, worker: WorkerId, now: float) -> None:
        """A frame of the worker's own feed arrived."""
        followed = self._followed.get(worker)
        if followed is not None:
            followed.http_at = now

    def doubt(self, worker: WorkerId, reason: str) -> None:
        """Its contents are known in part only, and why; an empty reason: they are known in full."""
        followed = self._followed.get(worker)
        if followed is not None:
            followed.doubt = reason

    def out_of_step(self) -> list[WorkerId]:
        """Workers with an event feed whose contents are not known in full."""
        return [f.info.id for f in self if f.info.event_feed and not f.in_step]

    def by_redis(self, followed: Followed, now: float, within_s: float = SILENT_S) -> bool:
        """Its events come through Redis: the log is read and its registration is fresh."""
        return _fresh(self.redis_at, now, within_s) and _fresh(followed.redis_at, now, within_s)

    def trust(self, followed: Followed, now: float) -> tuple[Trust, str]:
        """How far the index can be believed for a worker, and why."""
        info = followed.info
        if not info.prefix_cache:
            return Trust.BLIND, "prefix cache is off"
        if not info.event_feed:
            return Trust.LEARNED, "no event feed"
        if followed.doubt:
            return Trust.LEARNED, followed.doubt
        if followed.position is None:
            return Trust.LEARNED, "no snapshot yet"
        if not followed.in_step:
            return Trust.LEARNED, "gap in its events"
        if self.by_redis(followed, now):
            return Trust.EXACT, "events through redis"
        if _fresh(followed.http_at, now, SILENT_S):
            return Trust.EXACT, "events from the worker"
        return Trust.LEARNED, "event feed is silent"


def _cut(batch: EventBatch) -> list[EventBatch]:
    """Large contents as a small snapshot and further pieces; anything else as it is."""
    tiers = [event for event in batch.events if isinstance(event, Snapshot)]
    if not starts_anew(batch) or len(tiers) < len(batch.events):
        return [batch]
    size = PIECE_KEYS * 8
    parts = [
        (tier.packed_keys[start : start + size], tier.tier)
        for tier in tiers
        for start in range(0, len(tier.packed_keys), size)
    ]
    if sum(len(tier.packed_keys) for tier in tiers) <= size:
        return [batch]
    # The first empties all tiers, so it must be one of the device, which may hold nothing.
    head = parts.pop(0)[0] if parts[0][1] is Tier.GPU else b""
    first = msgspec.structs.replace(batch, events=(Snapshot(head),))
    further = (BlocksStored(part, None, tier) for part, tier in parts)
    pieces = [msgspec.structs.replace(batch, source=PIECE_SOURCE, events=(e,)) for e in further]
    return [first, *pieces]


def _fresh(at: float | None, now: float, within_s: float) -> bool:
    return at is not None and now - at < within_s
