"""Which road each worker's events take, and how far they are believed because of it.

    redis up, registration fresh   the shared log; a hole is closed from the checkpoint, and if that
                                   cannot do it, from the worker's own feed
    otherwise                      the worker's own feed
    an engine of another make      its event streams (``enginefeed``)
Both may run at once for a while: batches that come twice are skipped by their numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from random import Random
from typing import Any

import aiohttp
import structlog

from gateway.config import WorkersConfig
from gateway.feeds.base import FedRouter
from gateway.feeds.enginefeed import EngineFeeds
from gateway.feeds.httpfeed import FeedBroken, read_feed
from gateway.feeds.redisfeed import SLICE_S, CheckpointLoader, take_in
from gateway.feeds.retrying import Backoff
from gateway.feeds.tasks import TaskSet
from gateway.feeds.tending import Tender
from gateway.index.base import Applied
from gateway.index.replica import Followed, Replica, starts_anew
from gateway.index.stats import FeedStats
from gateway.ticks import tick
from shared.events import EventBatch
from shared.types import WorkerId

OURS = "headwater"
TICK_S = 0.25
BY_REDIS_S = 2.5
"""Without news from Redis for this long, a worker is asked itself."""
SETTLE_S = 2.0
"""A worker's own feed is kept until Redis has carried its events for this long."""
PATIENCE_S = 2.0
"""The log has this long to close a hole by itself (it is being read from further back)."""


class Roads:
    """Starts and stops the workers' own feeds, asks for checkpoints, and reports trust."""

    def __init__(
        self,
        router: FedRouter,
        replica: Replica,
        tender: Tender,
        session: aiohttp.ClientSession,
        config: WorkersConfig,
        stats: FeedStats,
        *,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._router, self._replica, self._tender = router, replica, tender
        self._session, self._config, self._stats = session, config, stats
        self._clock, self._rng = clock, rng
        self._headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._feeds = TaskSet(stats)
        self._told: set[WorkerId] = set()
        self._hole_since: dict[WorkerId, float] = {}
        self._redis_since: dict[WorkerId, float] = {}
        self.checkpoints: CheckpointLoader | None = None
        """Set where Redis is configured."""
        self.engines: EngineFeeds | None = None
        """Set by whoever starts this."""
        self._log: Any = structlog.get_logger("gateway.feeds")

    async def run(self) -> None:
        """Decide anew four times a second, for ever."""
        while True:
            self.tick()
            await tick(TICK_S)

    async def close(self) -> None:
        """Stop all feeds."""
        await self._feeds.close()
        if self.engines is not None:
            self.engines.close()

    def start_over(self, worker: WorkerId) -> None:
        """Nothing is known of a worker's contents any more: read them anew."""
        self._replica.start_over(worker)
        self._feeds.cancel(worker)
        self.tick()

    def tick(self) -> None:
        """Bring feeds, wishes and trust in line with what is known now."""
        now = self._clock()
        wanted: set[WorkerId] = set()
        for followed in self._replica:
            self._tell_trust(followed, now)
            if followed.info.event_feed and self._wants_own_feed(followed, now):
                wanted.add(followed.info.id)
        for worker in wanted:
            self._feeds.spawn(worker, self._reader(worker))
        for key in self._feeds.running():
            if key not in wanted:
                self._feeds.cancel(key)
        self._stats.http_feeds = len(wanted)
        self._forget_strangers()

    def _reader(self, worker: WorkerId) -> Callable[[], Any]:
        return lambda: self._read(worker)

    async def _read(self, worker: WorkerId) -> None:
        followed = self._replica.get(worker)
        if followed is None or followed.info.engine == OURS:
            await self.read_own_feed(worker)
        elif self.engines is not None:
            await self.engines.follow(worker)

    def _forget_strangers(self) -> None:
        known = {followed.info.id for followed in self._replica}
        for worker in self._told - known:
            self._told.discard(worker)
            self._hole_since.pop(worker, None)
            self._redis_since.pop(worker, None)
            if self.checkpoints is not None:
                self.checkpoints.settled(worker)

    def _tell_trust(self, followed: Followed, now: float) -> None:
        info = followed.info
        trust, reason = self._replica.trust(followed, now)
        # Each time: the router lowers a worker by itself when one of its batches does not fit.
        self._router.set_trust(info.id, trust, reason, now)
        self._told.add(info.id)

    def _wants_own_feed(self, followed: Followed, now: float) -> bool:
        worker = followed.info.id
        if followed.info.engine != OURS:
            return True
        if followed.in_step:
            self._hole_since.pop(worker, None)
            if self.checkpoints is not None:
                self.checkpoints.settled(worker)
        if not self._stats.redis_up or not self._replica.by_redis(followed, now, BY_REDIS_S):
            self._redis_since.pop(worker, None)
            return True
        since = self._redis_since.setdefault(worker, now)
        if followed.in_step:
            return worker in self._feeds and now - since < SETTLE_S
        return self._hole_needs_worker(worker, now)

    def _hole_needs_worker(self, worker: WorkerId, now: float) -> bool:
        since = self._hole_since.setdefault(worker, now)
        if self.checkpoints is None or now - since > PATIENCE_S:
            return True
        if worker in self.checkpoints.insufficient:
            return True
        self.checkpoints.want(worker)
        return worker in self._feeds

    async def read_own_feed(self, worker: WorkerId) -> None:
        """Follow one worker's own feed until cancelled, or until the worker has left."""
        backoff = Backoff(self._rng)
        whole = False
        while (followed := self._replica.get(worker)) is not None:
            feed = read_feed(
                self._session,
                followed.info.url,
                None if whole else self._replica.resume_after(worker),
                connect_s=self._config.connect_timeout_s,
                headers=self._headers,
            )
            whole = False
            try:
                async with aclosing(feed):
                    async for batches in feed:
                        self._replica.heard_http(worker, self._clock())
                        backoff.reset()
                        refused = await self._take(batches)
                        if refused is not None:
                            whole = refused.reason == "gap"
                            break
            except FeedBroken as error:
                self._log.info("worker_feed_broken", worker=worker, reason=str(error))
            # It may have restarted, or gone: its address knows.
            self._tender.suspect(worker)
            await backoff.pause()

    async def _take(self, batches: Sequence[EventBatch]) -> Applied | None:
        """Batches of a worker's own feed, in order; what became of the first that did not fit."""
        turn = self._clock()
        for batch in batches:
            now = self._clock()
            if now - turn > SLICE_S:
                await asyncio.sleep(0)
                turn = now = self._clock()
            if starts_anew(batch):
                applied = await take_in(self._replica, batch, now)
                self._stats.http_resyncs += applied.ok
            else:
                applied = self._replica.offer(batch, now)
            if not applied.ok:
                return applied
        return None
