"""What workers write about themselves in Redis: members that it names, and what it says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import structlog

from gateway.config import WorkersConfig
from gateway.discovery.base import Look, Sighting, Source, worker_url
from gateway.feeds.members import Member, Members
from gateway.index.replica import Replica
from gateway.index.stats import FeedStats
from shared.errors import ConfigError
from shared.load import WorkerLoad
from shared.types import WorkerId


class Tends(Protocol):
    """Who probes members and tells the router about them."""

    members: Members

    def add(self, url: str, source: Source, claimed: WorkerId | None = None) -> Member:
        """A source names an address: probe it from now on."""
        ...

    def wake(self, member: Member) -> None:
        """Probe it now."""
        ...

    def dismiss(self, member: Member, reason: str) -> None:
        """A member is gone, and the worker with it."""
        ...

    def note_load(self, member: Member, load: WorkerLoad) -> None:
        """What a worker says about its load, and what follows from it."""
        ...


class Registered:
    """Takes over what each look into Redis finds."""

    def __init__(
        self,
        tender: Tends,
        replica: Replica,
        config: WorkersConfig,
        stats: FeedStats,
        clock: Callable[[], float],
    ) -> None:
        self._tender, self._replica, self._config = tender, replica, config
        self._stats, self._clock = stats, clock
        self._last: tuple[Look, float] | None = None
        self.on_departed: Callable[[WorkerId], None] = lambda worker: None
        """Called after a worker has left; set before the start."""
        self._log: Any = structlog.get_logger("gateway.feeds")

    def looked(self, look: Look, redis_up_since: float) -> None:
        """Take over what one look found."""
        now, members = self._clock(), self._tender.members
        self._last = look, now
        for sighting in look.sightings.values():
            if not members.banned(sighting):
                self._take(sighting, now)
        members.note_leases(look, now)
        for member in members.departures(look, redis_up_since, now):
            reason = "drained" if member.draining else "lease gone and unreachable"
            self._tender.dismiss(member, reason)
            if member.info is not None:
                self.on_departed(member.info.id)

    def recall(self, worker: WorkerId) -> None:
        """A worker is usually known from Redis before it is asked: its events come from there."""
        if self._last is None:
            return
        look, at = self._last
        sighting = look.sightings.get(worker)
        if sighting is not None:
            self._replica.registered(worker, sighting.epoch, sighting.seq, at)

    def _take(self, sighting: Sighting, now: float) -> None:
        member = self._tender.members.look_for(sighting)
        if member is None:
            self._meet(sighting)
            return
        if self._config.from_redis:
            self._tender.members.add(member.url, Source.REDIS, sighting.info.id)
        info = member.info
        if info is None:
            return
        if info.id != sighting.info.id or info.epoch != sighting.epoch:
            # Either the registration is old or what we know is: only the address can tell.
            member.ask_again = True
            self._tender.wake(member)
            return
        self._replica.registered(info.id, sighting.epoch, sighting.seq, now)
        load = sighting.load
        if load is not None:
            member.redis_load_at = now
            # A beat waits for up to a second to be read; meanwhile the worker may have been asked.
            if not 0 < load.uptime_s < member.uptime_s:
                self._tender.note_load(member, load)

    def _meet(self, sighting: Sighting) -> None:
        if not self._config.from_redis:
            return
        try:
            url = worker_url("redis registration", sighting.info.url)
        except ConfigError as error:
            self._stats.decode_errors += 1
            self._log.warning("worker_without_address", worker=sighting.info.id, reason=str(error))
            return
        self._tender.add(url, Source.REDIS, sighting.info.id)
