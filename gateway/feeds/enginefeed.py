"""Engines' cache events -> the index: one stream per rank, one key map each, one numbering of ours.

    RankStream -> Engine.decode -> KeyMap -> (RankMerge) -> EventBatch -> Replica -> router -> index

What a worker holds counts as *exact* once everything since its start has been told; before that,
and after a loss, it is *learned* (its events are used, they are only not all there is) until its
cache has been filled anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import structlog
import zmq
import zmq.asyncio

from gateway.engines import catalogue
from gateway.engines.base import Cleared, FeedPlan, Frame, MalformedFrame
from gateway.engines.keymap import KeyMap
from gateway.feeds.enginebook import EngineBook
from gateway.feeds.enginestreams import UNKNOWN_PAST, Following, Rank, root_of
from gateway.feeds.places import Places
from gateway.feeds.tending import Tender
from gateway.feeds.zmqstream import RankStream, Told, What
from gateway.index.replica import Replica
from gateway.index.stats import FeedStats
from gateway.ticks import tick
from shared.blocks import pack_keys, stride_of
from shared.events import CacheEvent, Snapshot
from shared.load import WorkerInfo
from shared.types import Tier, WorkerId

WAIT_S = 0.5
RETRY_S = 5.0


class EngineFeeds:
    """Follows the streams of all engines that publish events.

    :param hash_key: key of the hash chain's root.
    """

    def __init__(
        self,
        replica: Replica,
        tender: Tender,
        book: EngineBook,
        stats: FeedStats,
        clock: Callable[[], float],
        hash_key: bytes,
    ) -> None:
        self._replica, self._tender, self._book = replica, tender, book
        self._stats, self._clock, self._hash_key = stats, clock, hash_key
        self._places = Places()
        self._context: zmq.asyncio.Context | None = None
        self._log: Any = structlog.get_logger("gateway.feeds")

    def close(self) -> None:
        """Close what sockets are left."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def follow(self, worker: WorkerId) -> None:
        """Follow one worker until cancelled, or until it has left."""
        try:
            while (followed := self._replica.get(worker)) is not None:
                plan = self._book.at(followed.info.url).plan
                if plan is None or not followed.info.tokenizer:
                    self._replica.doubt(worker, _why_not(followed.info))
                    await tick(WAIT_S)
                    continue
                self._places.put(worker, plan)
                if shared := self._places.shared(worker):
                    # Whose events these are cannot be told from them, so nobody's they are.
                    self._replica.doubt(worker, shared)
                    await tick(WAIT_S)
                    continue
                if followed.position is not None:
                    self._tender.renew(worker, "its events come from another place")
                try:
                    await self._follow(worker, plan)
                except* zmq.ZMQError as errors:
                    reason = f"{plan.endpoints[0]}: {errors.exceptions[0]}"
                    self._replica.doubt(worker, reason)
                    self._log.warning("engine_feed_failed", worker=worker, reason=reason)
                    await asyncio.sleep(RETRY_S)
        finally:
            self._places.drop(worker)
            self._book.recalling.discard(worker)

    async def _follow(self, worker: WorkerId, plan: FeedPlan) -> None:
        """Until the worker's plan or tokenizer is another one."""
        followed = self._replica.get(worker)
        if followed is None:
            return
        info = followed.info
        if self._context is None:
            self._context = zmq.asyncio.Context()
        following = Following(
            worker, catalogue.engine(info.engine), plan, info.tokenizer, info.epoch
        )
        for number, endpoint in enumerate(plan.endpoints):
            replay = plan.replays[number] if number < len(plan.replays) else None
            stream = RankStream(self._context, endpoint, replay, plan.topic, self._stats)
            following.ranks.append(Rank(number, stream, self._key_map(worker, info.block_size)))
        self._begin(following, info)
        self._stats.engine_feeds += len(following.ranks)
        try:
            async with asyncio.TaskGroup() as group:
                reads = [group.create_task(self._read(following, r)) for r in following.ranks]
                await self._until_other(following)
                for read in reads:
                    read.cancel()
        finally:
            self._stats.engine_feeds -= len(following.ranks)

    async def _until_other(self, following: Following) -> None:
        while (known := self._replica.get(following.worker)) is not None:
            entry, info = self._book.at(known.info.url), known.info
            told = (entry.plan, info.engine, info.tokenizer)
            if told != (following.plan, following.engine.name, following.tokenizer):
                return
            if shared := self._places.shared(following.worker):
                self._tender.renew(following.worker, shared)
                return
            if info.epoch != following.epoch:
                # Somebody else has seen another incarnation.
                self._begin(following, info)
                for rank in following.ranks:
                    rank.stream.restart()
            await tick(WAIT_S)

    def _begin(self, following: Following, info: WorkerInfo) -> None:
        """A new incarnation: an empty index, in which all that comes is put."""
        following.begin(info, lambda: self._key_map(info.id, info.block_size))
        # An empty batch, not an empty snapshot: a new epoch is empty, and what has been learned of
        # it since then is there.
        self._send(following, ())
        self._tell(following)

    def _key_map(self, worker: WorkerId, block_size: int) -> KeyMap:
        def root(adapter: str, salt: str) -> bytes | None:
            followed = self._replica.get(worker)
            if followed is None:
                return None
            return root_of(followed.info, adapter, salt, self._hash_key)

        return KeyMap(root, block_size)

    async def _read(self, following: Following, rank: Rank) -> None:
        async with aclosing(rank.stream.follow()) as stream:
            async for told in stream:
                self._hear(following, rank, told)

    def _hear(self, following: Following, rank: Rank, told: Told) -> None:
        now = self._clock()
        if all(one.stream.connected for one in following.ranks):
            self._replica.heard_http(following.worker, now)
        if told.what is What.BATCH:
            self._take(following, rank, told.payload, now)
        elif told.what is What.COMPLETE:
            rank.complete = True
        elif told.what is What.LATE:
            rank.complete, rank.why = False, UNKNOWN_PAST
        elif told.what is What.RESTARTED:
            if following.seq > 1 or rank.complete:
                self._renew(following, rank, told.reason)
        elif told.what is What.LOST:
            self._lose(following, rank, told.reason)
        else:
            self._look_at_quiet(following, rank, now)
        self._tell(following)

    def _look_at_quiet(self, following: Following, rank: Rank, now: float) -> None:
        """Nothing came: perhaps there is nothing, or what was waited for never came."""
        if not rank.complete and rank.stream.silent_so_far:
            rank.complete = self._tender.has_not_worked(following.worker)
        abandoned = rank.keys.expire(now)
        if abandoned > rank.abandoned and rank.complete:
            self._lose(following, rank, "some events continue blocks that were never told")
        rank.abandoned = abandoned

    def _take(self, following: Following, rank: Rank, payload: bytes, now: float) -> None:
        self._stats.engine_frames += 1
        try:
            frame = following.engine.decode(payload)
        except MalformedFrame as error:
            self._stats.malformed_frames += 1
            self._lose(following, rank, f"its events cannot be read: {error}")
            return
        if frame.malformed:
            self._stats.malformed_events += frame.malformed
            self._lose(following, rank, f"{frame.malformed} of its events cannot be read")
        if frame.unknown:
            if not rank.unknown:
                self._log.warning(
                    "engine_events_unknown", worker=following.worker, count=frame.unknown
                )
            rank.unknown += frame.unknown
            self._stats.unknown_events += frame.unknown
        following.at = frame.at
        events = rank.keys.take(frame, now)
        if rank.keys.other_size:
            events = self._resize(following, rank, frame, now)
        if not frame.malformed and any(isinstance(event, Cleared) for event in frame.events):
            rank.complete = True
        self._emit(following, following.merged(rank, events))
        if rank.keys.full:
            rank.complete, rank.why = False, "too many blocks of odd size: use --page-size 16"
        elif not rank.complete and not frame.malformed:
            self._look_for_turnover(following, rank)

    def _look_for_turnover(self, following: Following, rank: Rank) -> None:
        """Once as many blocks have come as there is room for, what was there before is gone, but
        for what is in constant use. What was learned of that before gives way to what was told:
        nobody could say when it is evicted."""
        followed = self._replica.get(following.worker)
        room = 0 if followed is None else followed.info.blocks_total
        if not room or rank.keys.stats.stored - rank.stored_before < room:
            return
        rank.complete = True
        if following.merge is None:
            held = rank.keys.contents()
            told = [Snapshot(pack_keys(held[tier]), tier) for tier in (Tier.GPU, Tier.HOST)]
            self._emit(following, [*told])

    def _resize(
        self, following: Following, rank: Rank, frame: Frame, now: float
    ) -> list[CacheEvent]:
        """Its blocks are of another size than was known: begin anew with that."""
        size, followed = rank.keys.other_size, self._replica.get(following.worker)
        if followed is None:
            return []
        # Where nothing but this frame is known, nothing has to be told again.
        first, complete = not len(rank.keys), rank.complete
        self._book.at(followed.info.url).block_size = size
        reason = f"its blocks have {size} tokens, not {rank.keys.block_size}"
        self._renew(following, rank, reason, size)
        if not first:
            rank.stream.restart()
            return []
        rank.complete = complete
        return rank.keys.take(frame, now)

    def _renew(self, following: Following, rank: Rank, reason: str, block_size: int = 0) -> None:
        """Another incarnation; the other ranks' streams tell theirs from the beginning."""
        followed = self._replica.get(following.worker)
        if block_size or followed is None or followed.info.epoch == following.epoch:
            self._tender.renew(following.worker, reason, block_size)
            followed = self._replica.get(following.worker)
        # Else somebody has seen it already: what was learned since then stays.
        if followed is not None:
            self._begin(following, followed.info)
        for other in following.ranks:
            if other is not rank:
                other.stream.restart()

    def _lose(self, following: Following, rank: Rank, reason: str) -> None:
        """Forget what was told: a removal may be among what was lost."""
        self._stats.engine_losses += 1
        if rank.complete or rank.why != reason:
            self._log.warning("engine_events_lost", worker=following.worker, reason=reason)
        if len(rank.keys):
            self._renew(following, rank, reason)
        rank.complete, rank.why = False, reason
        rank.stored_before = rank.keys.stats.stored

    def _emit(self, following: Following, events: list[CacheEvent]) -> None:
        if events:
            self._send(following, tuple(events))

    def _send(self, following: Following, events: tuple[CacheEvent, ...]) -> None:
        followed = self._replica.get(following.worker)
        if followed is None or followed.info.epoch != following.epoch:
            return
        batch = following.number(events, stride_of(followed.info.block_size))
        self._replica.offer(batch, self._clock())

    def _tell(self, following: Following) -> None:
        """How far the contents are known."""
        self._replica.doubt(following.worker, following.doubt())
        if following.recalls():
            self._book.recalling.add(following.worker)
        else:
            self._book.recalling.discard(following.worker)


def _why_not(info: WorkerInfo) -> str:
    if not info.tokenizer:
        model = info.models[0] if info.models else ""
        return f"its events need a tokenizer: set [render] tokenizers for '{model}'"
    return "it is not known where it publishes"
