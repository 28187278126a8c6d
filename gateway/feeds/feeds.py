"""Everything that brings facts from outside into the router, started and stopped as one.

    tending      one task per address: who is it, is it ready, how busy      -> join, health, load
    lists        DNS names, a file, EndpointSlices                           -> members, drains
    parity       probe prompts, once per worker                              -> parity
    roads        per worker: through Redis or its own feed                   -> events, trust
    redisside    all that comes through Redis, and goes there

Requests never wait for any of this, and nothing here waits for a request: a Redis that is down,
frozen or emptied costs the request path nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random

import aiohttp

from gateway.config import DiscoveryConfig, GatewayConfig, WorkersConfig
from gateway.decision import WorkerStatus
from gateway.discovery.allowed import CheckedResolver, Reachable, check_address
from gateway.discovery.base import Listing, Source, worker_url
from gateway.discovery.static import static_listing
from gateway.feeds.base import FedAndSharing
from gateway.feeds.enginebook import EngineBook
from gateway.feeds.enginefeed import EngineFeeds
from gateway.feeds.fingerprints import Fingerprints
from gateway.feeds.health import Prober
from gateway.feeds.members import Member
from gateway.feeds.outsiders import outsider
from gateway.feeds.parity import OwnTokens, ParityProber
from gateway.feeds.redisside import RedisSide
from gateway.feeds.roads import Roads
from gateway.feeds.sources import FollowedLists, SourceState, make_sources
from gateway.feeds.tasks import TaskSet
from gateway.feeds.tending import Tender
from gateway.index.replica import Replica
from gateway.index.stats import FeedStats
from gateway.upstream import Upstream
from gateway.wire.client import WireUpstream
from shared.errors import BadRequest, ConfigError
from shared.tls import client_context
from shared.types import WorkerId

FIRST_PROBES_S = 2.0
"""How long a start waits at most for the first probes of workers that were named to it."""
FEED_CONNECTIONS = 8
"""To one worker at once: its feed, the comparison of tokens, and what is just being closed."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where time and chance come from."""

    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    rng: Random = field(default_factory=Random)


class Feeds:
    """The gateway's background side. ``start`` it in the event loop, ``stop`` it once.

    :param router: everything goes there; its ``now`` is ``sources.clock``.
    :param gateway_id: name of this process among all gateways of the deployment.
    :param own_tokens: what workers' tokens are compared with; None compares nothing.
    :raises ConfigError: a worker URL or the Redis URL is none.
    """

    def __init__(
        self,
        router: FedAndSharing,
        config: GatewayConfig,
        *,
        gateway_id: str,
        sources: Sources | None = None,
        own_tokens: OwnTokens | None = None,
        reachable: Reachable | None = None,
    ) -> None:
        self._router, self._config = router, config
        self._sources = sources or Sources()
        self._static = static_listing(config.workers)
        self._lists = make_sources(
            config.discovery, clock=self._sources.clock, rng=self._sources.rng
        )
        self.book = EngineBook(config.workers)
        self.stats = FeedStats(redis_configured=config.redis.url != "none")
        self._tasks = TaskSet(self.stats)
        self._replica = Replica(router.apply_events, self.stats)
        self._redis: RedisSide | None = None
        if self.stats.redis_configured:
            self._redis = RedisSide(
                config,
                router,
                self._replica,
                gateway_id,
                self.stats,
                clock=self._sources.clock,
                rng=self._sources.rng,
            )
        self._session: aiohttp.ClientSession | None = None
        self._probes: Upstream | None = None
        self._tender: Tender | None = None
        self._roads: Roads | None = None
        self.reachable = reachable or Reachable()
        self.reachable.replace(self._static.workers)
        self._followed: FollowedLists | None = None
        self._first_probes_until = inf
        self._own_tokens = own_tokens
        self._parity: ParityProber | None = None
        self.on_silent: Callable[[WorkerId], None] = lambda worker: None
        """Called while a worker has answered nothing for many probes; set before the start."""

    async def start(self) -> None:
        """Begin in the background; waits for nobody."""
        workers = self._config.workers
        tls = client_context("workers", workers.tls_ca, workers.tls_cert, workers.tls_key)
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=FEED_CONNECTIONS,
            ssl=True if tls is None else tls,
            resolver=CheckedResolver(self.reachable),
        )
        self._session = session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=True
        )
        self._probes = probes = WireUpstream(tls, verbatim=True, allows=self.reachable.allows)
        clock, rng = self._sources.clock, self._sources.rng
        self._tender = tender = Tender(
            self._router,
            self._replica,
            Prober(probes, workers, self.book, Fingerprints(self._config.render)),
            workers,
            self.stats,
            clock=clock,
            wall=self._sources.wall,
            rng=rng,
        )
        tender.on_silent = self.on_silent
        engines = EngineFeeds(
            self._replica,
            tender,
            self.book,
            self.stats,
            clock,
            self._config.deployment.hash_key,
        )
        self._roads = roads = Roads(
            self._router,
            self._replica,
            tender,
            session,
            workers,
            self.stats,
            clock=clock,
            rng=rng,
        )
        roads.engines = engines
        if self._redis is not None:
            self._redis.start(self._tasks, tender, roads)
        self._tasks.spawn("roads", roads.run)
        if self._own_tokens is not None:
            self._parity = parity = ParityProber(
                self._router, self._own_tokens, session, workers, self.stats, clock
            )
            self._tasks.spawn("parity", lambda: parity.run(tender.members))
        tender.listed(Source.STATIC, self._static)
        self._first_probes_until = clock() + FIRST_PROBES_S
        self._followed = FollowedLists(tender.listed, self.stats, clock)
        self._followed.start(self._lists)

    async def stop(self) -> None:
        """End all tasks and connections. What the router knows stays."""
        await self._tasks.close()
        if self._followed is not None:
            await self._followed.close()
        if self._parity is not None:
            await self._parity.close()
        if self._roads is not None:
            await self._roads.close()
        if self._tender is not None:
            await self._tender.close()
        if self._session is not None:
            await self._session.close()
        if self._probes is not None:
            await self._probes.close()

    async def add_worker(self, url: str) -> WorkerId:
        """Take a worker in by hand; returns its name once it has said who it is.

        :raises BadRequest: no URL, an address where no worker may be (see ``allowed``), nobody
            answers there, or its name is taken.
        """
        tender = self._running()
        try:
            checked = worker_url("url", url.strip())
        except ConfigError as error:
            raise BadRequest(str(error), param="url") from error
        await check_address(checked)
        known = tender.members.at(checked)
        kept = known is not None
        worker, reason = await tender.introduce(checked)
        if worker is None:
            member = tender.members.at(checked)
            if member is not None and not kept:
                tender.dismiss(member, "nobody there")
            raise BadRequest(f"no worker at {checked}: {reason}", param="url")
        if self._redis is not None:
            await self._redis.drains.say(worker, drained=False)
        return worker

    async def drain_worker(self, worker: WorkerId, *, on: bool) -> bool:
        """No new requests there, from any gateway on this Redis, or new ones again. Holds here at
        once, and at the others when this returns. False: unknown."""
        change = self._router.drain if on else self._router.undrain
        if not change(worker, self._sources.clock()):
            return False
        if self._redis is not None:
            await self._redis.drains.say(worker, drained=on)
        return True

    def remove_worker(self, worker: WorkerId) -> bool:
        """Let a worker go; this incarnation does not come back through Redis. False: unknown."""
        tender = self._running()
        member = tender.members.worker(worker)
        if member is None:
            member = self._outside(worker)
        if member is None:
            return False
        tender.dismiss(member, "removed", ban=True)
        if self._redis is not None:
            self._redis.drains.let_go(worker)
        return True

    def replace_static(self, config: WorkersConfig) -> None:
        """Another static list; workers that nobody names any more leave.

        :raises ConfigError: the list is wrong; nothing has changed.
        """
        self._static = static_listing(config)
        self.reachable.replace(self._static.workers)
        self.book.replace(config)
        if self._tender is not None:
            self._tender.listed(Source.STATIC, self._static)

    async def replace_lists(self, config: DiscoveryConfig) -> None:
        """Other lists; whom only a list named that is followed no longer leaves.

        :raises ConfigError: one of them cannot work; nothing has changed.
        """
        lists = make_sources(config, clock=self._sources.clock, rng=self._sources.rng)
        self._lists = lists
        if self._followed is None or self._tender is None:
            return
        await self._followed.close()
        for source in self._followed.states.keys() - {one.source for one in lists}:
            self._tender.listed(source, Listing({}))
        self._followed = FollowedLists(self._tender.listed, self.stats, self._sources.clock)
        self._followed.start(lists)

    def awaited(self) -> list[str]:
        """Addresses of the static list as it was at the start that have neither answered their
        first probe nor failed it; nobody once that has taken too long.

        Until then whoever was first to answer would get all that comes.
        """
        if self._tender is None or self._sources.clock() >= self._first_probes_until:
            return []
        members = self._tender.members
        waiting = [m.url for m in members if Source.STATIC in m.sources and not m.probes]
        if not waiting:
            self._first_probes_until = -inf
        return waiting

    def strangers(self) -> list[str]:
        """Addresses that have not said yet who they are, each with the reason; for people."""
        return [f"{status.url}: {status.reason}" for status in self.outsiders()]

    def outsiders(self) -> list[WorkerStatus]:
        """Those addresses as operators see them beside the workers."""
        if self._tender is None:
            return []
        return [outsider(member) for member in self._tender.members if member.info is None]

    def named_by(self, worker: WorkerId) -> list[str]:
        """Who named a worker."""
        member = None if self._tender is None else self._tender.members.worker(worker)
        if member is None and self._tender is not None:
            member = self._outside(worker)
        return [] if member is None else sorted(map(str, member.sources))

    def _outside(self, worker: WorkerId) -> Member | None:
        """The member of an address that never said who it is."""
        outside = (m for m in self._running().members if m.info is None)
        return next((m for m in outside if outsider(m).id == worker), None)

    def lists(self) -> list[SourceState]:
        """The lists of workers that are followed, and how they are."""
        return [] if self._followed is None else list(self._followed.states.values())

    def resync(self, worker: WorkerId) -> None:
        """Ask a worker for its whole contents again; one without an event feed has none to tell."""
        if self._roads is not None:
            self._roads.start_over(worker)

    def suspect(self, worker: WorkerId) -> None:
        """A request to this worker failed: probe it now rather than at the next turn."""
        if self._tender is not None:
            self._tender.suspect(worker)

    def _running(self) -> Tender:
        if self._tender is None:
            raise RuntimeError("the feeds were not started")
        return self._tender
