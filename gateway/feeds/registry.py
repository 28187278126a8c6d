"""Looking at the registrations each second; the one place that says whether Redis is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import structlog

from gateway.discovery.base import Look
from gateway.discovery.redis import RedisDiscovery
from gateway.feeds.retrying import repeat
from gateway.index.redis import is_replica
from gateway.index.stats import FeedStats
from shared.redislink import RedisLink, RedisLost
from shared.types import WorkerId

LOOK_EVERY_S = 1.0


class RegistryWatch:
    """Calls ``on_look(look, up_since)`` after each successful look."""

    def __init__(
        self,
        link: RedisLink,
        discovery: RedisDiscovery,
        stats: FeedStats,
        on_look: Callable[[Look, float], None],
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._link, self._discovery, self._stats, self._on_look = link, discovery, stats, on_look
        self._clock, self._rng = clock, rng
        self._up_since: float | None = None
        self._told: bool | None = None
        self._unreadable: Mapping[WorkerId, str] = {}
        self._log: Any = structlog.get_logger("gateway.feeds")

    async def run(self) -> None:
        """Look for ever."""

        async def turn() -> None:
            await self.look_once()
            await asyncio.sleep(LOOK_EVERY_S)

        await repeat(self._link, turn, self._note_down, self._rng)

    async def look_once(self) -> None:
        """One look; :class:`RedisLost` if the server cannot be used."""
        [role] = await self._link.call([("ROLE",)])
        # In a Cluster a demoted master sends us on by itself.
        if is_replica(role) and not self._link.cluster:
            await self._link.drop()
            raise RedisLost("it is a replica: writes would be refused")
        look = await self._discovery.look(self._link)
        self._stats.decode_errors += len(look.unreadable)
        self._note_unreadable(look.unreadable)
        if self._up_since is None:
            self._up_since = self._clock()
        self._stats.redis_up, self._stats.redis_reason = True, ""
        if self._told is not True:
            self._told = True
            self._log.info("redis_up", workers=len(look.sightings))
        self._on_look(look, self._up_since)

    def _note_unreadable(self, unreadable: Mapping[WorkerId, str]) -> None:
        """One line for each worker and reason, not one a second."""
        for worker, reason in unreadable.items():
            if self._unreadable.get(worker) != reason:
                self._log.warning("registration_unreadable", worker=worker, reason=reason)
        self._unreadable = unreadable

    def _note_down(self, error: RedisLost) -> None:
        reason = str(error)
        self._stats.redis_outages += self._up_since is not None
        self._up_since = None
        self._stats.redis_up, self._stats.redis_reason = False, reason
        if self._told is not False:
            self._told = False
            self._log.warning("redis_down", reason=reason)
