"""Tending the members: probing each, finding out who it is, and telling the router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import structlog

from gateway.config import WorkersConfig
from gateway.discovery.allowed import refusal
from gateway.discovery.base import Listing, Source
from gateway.feeds.answers import Probe
from gateway.feeds.base import BY_LIST, BY_WORKER, FedRouter
from gateway.feeds.claims import Claims
from gateway.feeds.epochs import Epochs
from gateway.feeds.health import Prober
from gateway.feeds.members import NOT_PROBED, SILENT_PROBES, Adoption, Member, Members
from gateway.feeds.registered import Registered
from gateway.feeds.tasks import TaskSet
from gateway.index.replica import Replica
from gateway.index.stats import FeedStats
from shared.load import WorkerInfo, WorkerLoad
from shared.types import WorkerId

PERIOD_SHARE = (0.85, 1.0)
"""A probe begins after this share of the interval: never late, and not all in step."""
PROBES_PER_S = 200.0
"""In a large fleet each worker is probed less often, so that all take no more than this."""
LOAD_FRESH_SHARE = 1.5
"""A load from Redis spares asking for it over HTTP for this many intervals."""


class Tender:
    """Owns the members and one probing task for each."""

    def __init__(
        self,
        router: FedRouter,
        replica: Replica,
        prober: Prober,
        config: WorkersConfig,
        stats: FeedStats,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        rng: Random,
    ) -> None:
        self._router, self._replica, self._prober, self._config = router, replica, prober, config
        self._stats, self._clock, self._rng = stats, clock, rng
        self._epochs = Epochs(wall, rng)
        self.members = Members()
        self.claims = Claims(self.members)
        self._tasks = TaskSet(stats)
        self._wakes: dict[Member, asyncio.Event] = {}
        self.registered = Registered(self, replica, config, stats, clock)
        self.on_new: Callable[[WorkerId], None] = lambda worker: None
        """Called when an incarnation of a worker was seen for the first time."""
        self.on_silent: Callable[[WorkerId], None] = lambda worker: None
        """Called while a worker has answered nothing for many probes."""
        self._log: Any = structlog.get_logger("gateway.feeds")

    def add(self, url: str, source: Source, claimed: WorkerId | None = None) -> Member:
        """A source names an address: probe it from now on."""
        member = self.members.add(url, source, claimed)
        self._wakes.setdefault(member, asyncio.Event())
        self._tasks.spawn(member, lambda: self._tend(member))
        return member

    def listed(self, source: Source, listing: Listing) -> None:
        """A list of workers was read: whom it names is tended, whom nobody names is let go."""
        changes = self.claims.take(source, listing)
        for url in changes.add:
            self.add(url, source)
        for member in changes.leave:
            self.dismiss(member, f"no longer named by {source}")
        self._follow_drains()

    def _follow_drains(self) -> None:
        """Tell the router which workers the lists want drained, where that has changed."""
        drains, now = self.claims.drains(), self._clock()
        for member in self.members:
            reason = drains.get(member, "")
            if member.info is None or reason == member.listed_drain:
                continue
            member.listed_drain = reason
            if reason:
                self._router.drain(member.info.id, now, BY_LIST, reason)
            else:
                self._router.undrain(member.info.id, now, BY_LIST)

    async def introduce(self, url: str) -> tuple[WorkerId | None, str]:
        """Add an address by hand and ask it who it is.

        :returns: its name and "", or None and why not.
        """
        self.claims.welcome(url)
        member = self.members.add(url, Source.ADMIN)
        answer = await self._prober.identify(url)
        if isinstance(answer, Probe):
            return None, answer.reason
        if self.members.at(url) is not member:
            return None, "removed meanwhile"
        adoption = self._adopt(member, self._epochs.dated(member, answer))
        if adoption is Adoption.CONFLICT:
            return None, member.reason
        if adoption is not Adoption.ALIAS:
            self.wake(self.add(url, Source.ADMIN))
        return WorkerId(answer.id), ""

    def wake(self, member: Member) -> None:
        """Probe it now."""
        wake = self._wakes.get(member)
        if wake is not None:
            wake.set()

    def suspect(self, worker: WorkerId) -> None:
        """Something about a worker is odd: ask it who it is, now."""
        member = self.members.worker(worker)
        if member is not None:
            member.ask_again = True
            self.wake(member)

    def dismiss(self, member: Member, reason: str, *, ban: bool = False) -> None:
        """A member is gone, and the worker with it. ``ban``: it was removed by hand."""
        if ban:
            self.claims.dismiss(member)
        self.claims.forget(member)
        self.members.remove(member, ban=ban)
        if member.info is not None:
            self._replica.forget(member.info.id)
            self._router.leave(member.info.id, self._clock(), reason)
            self._log.info("worker_left", worker=member.info.id, reason=reason)
        self._end(member)

    def _end(self, member: Member) -> None:
        self._wakes.pop(member, None)
        self._tasks.cancel(member)

    async def close(self) -> None:
        """Stop all probing."""
        await self._tasks.close()

    async def _tend(self, member: Member) -> None:
        wake = self._wakes[member]
        while self.members.at(member.url) is member:
            wake.clear()
            started = self._clock()
            await self.probe(member)
            interval = max(self._config.health_interval_s, len(self.members) / PROBES_PER_S)
            pause = interval * self._rng.uniform(*PERIOD_SHARE)
            rest = pause - (self._clock() - started)
            if rest <= 0:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(rest):
                    await wake.wait()
            except TimeoutError:
                continue
        self._wakes.pop(member, None)

    async def probe(self, member: Member) -> None:
        """One probe of one member, and what follows from it."""
        if member.must_identify():
            if await self._is_refused(member):
                return
            answer = await self._prober.identify(member.url)
            if self.members.at(member.url) is not member:
                return
            if isinstance(answer, Probe):
                self._note(member, answer)
                return
            adoption = self._adopt(member, self._epochs.dated(member, answer))
            if adoption in (Adoption.ALIAS, Adoption.CONFLICT):
                return
        info = member.info
        if info is None:
            return
        probe = await self._prober.probe(info, with_load=not self._load_is_fresh(member))
        if self.members.at(member.url) is member and member.info is info:
            self._note(member, probe)

    async def _is_refused(self, member: Member) -> bool:
        """Whether no worker may be at its address, wherever a name leads to by now."""
        if Source.STATIC in member.sources:
            return False
        reason = await refusal(member.url)
        if reason and self.members.at(member.url) is member:
            self._note(member, Probe(False, reason))
        return bool(reason)

    def _load_is_fresh(self, member: Member) -> bool:
        limit = LOAD_FRESH_SHARE * self._config.health_interval_s
        return member.redis_load_at is not None and self._clock() - member.redis_load_at < limit

    def renew(self, worker: WorkerId, reason: str, block_size: int = 0) -> None:
        """A foreign engine has shown that it holds nothing of what was known: another incarnation,
        perhaps with blocks of another size. It goes on taking requests."""
        member = self.members.worker(worker)
        if member is None or member.info is None:
            return
        known = member.info
        info = msgspec.structs.replace(
            known, epoch=self._epochs.next(known), block_size=block_size or known.block_size
        )
        healthy, draining = bool(member.healthy), member.draining
        self.members.adopt(member, info)
        member.draining = draining
        self._router.join(info, self._clock())
        self._router.set_health(worker, healthy, self._clock(), member.reason)
        self._replica.follow(info)
        self._stats.engine_restarts += 1
        self._log.warning("worker_started_anew", worker=worker, reason=reason)
        self.on_new(worker)
        # Whoever was started anew may serve another model.
        self.suspect(worker)

    def has_not_worked(self, worker: WorkerId) -> bool:
        """It said at its last probe that it has served nothing yet: its cache is empty."""
        member = self.members.worker(worker)
        return member is not None and member.work == 0

    def _adopt(self, member: Member, info: WorkerInfo) -> Adoption:
        before = member.info
        adoption = self.members.adopt(member, info)
        now = self._clock()
        if before is not None and before.id != info.id:
            self._replica.forget(before.id)
            self._router.leave(before.id, now, "another worker at its address")
        if adoption is Adoption.ALIAS:
            self._log.info("worker_alias", worker=info.id, url=member.url)
            known = self.members.worker(info.id)
            if known is not None:
                self.claims.alias(member.url, known)
            self._end(member)
        elif adoption is Adoption.CONFLICT:
            self._stats.conflicts += 1
            self._log.error("worker_name_conflict", worker=info.id, url=member.url)
        elif adoption is not Adoption.SAME and member.info is not None:
            self._router.join(member.info, now)
            self._replica.follow(member.info)
        if adoption in (Adoption.JOINED, Adoption.RESTARTED):
            # Who answers is not yet ready: that is the next question.
            member.healthy = None
            self._router.set_health(info.id, False, now, NOT_PROBED)
            self._log.info(f"worker_{adoption}", worker=info.id, url=member.url)
            self.on_new(info.id)
            self.registered.recall(info.id)
        if adoption is not Adoption.SAME:
            if adoption is Adoption.JOINED:
                member.listed_drain = ""
            self._follow_drains()
        return adoption

    def _note(self, member: Member, probe: Probe) -> None:
        now = self._clock()
        member.probes += 1
        if not probe.healthy:
            member.ask_again = True
        if member.excuses(late=not (probe.healthy or probe.alive or probe.refused)):
            return
        member.refused = probe.refused or (member.refused and not probe.alive)
        if probe.load is not None:
            self.note_load(member, probe.load)
        reading = probe.reading
        if reading is not None and member.note_reading(reading.work, reading.started):
            assert member.info is not None
            self.renew(member.info.id, "its counters began anew")
        healthy = probe.healthy or (member.draining and probe.alive)
        if healthy != member.healthy:
            self._log.info(
                "worker_health",
                worker=member.info.id if member.info else member.url,
                healthy=healthy,
                reason=probe.reason,
            )
        member.healthy, member.reason = healthy, probe.reason
        if member.info is None:
            return
        if probe.names is not None and probe.names != member.info.names:
            models, adapters = probe.names
            info = msgspec.structs.replace(member.info, models=models, adapters=adapters)
            self._adopt(member, info)
        self._router.set_health(member.info.id, healthy, now, probe.reason)
        if member.late >= SILENT_PROBES:
            self.on_silent(member.info.id)

    def note_load(self, member: Member, load: WorkerLoad) -> None:
        """What a worker says about its load, and what follows from it."""
        if member.info is None:
            return
        now = self._clock()
        member.note_uptime(load.uptime_s)
        if load.info_revision > member.info.revision:
            # It has loaded or unloaded an adapter since it was asked who it is.
            member.ask_again = True
            self.wake(member)
        self._router.apply_load(member.info.id, load, now)
        if load.draining and not member.draining:
            self._router.drain(member.info.id, now, BY_WORKER)
        elif member.draining and not load.draining:
            self._router.undrain(member.info.id, now, BY_WORKER)
        member.draining = load.draining
