"""The tasks that talk to Redis, each over a link of its own, and how they hang together.

registry     one look at the registrations each second                   -> members, leases
log          the shared event log                                        -> events
checkpoints  contents of workers that just joined or have a gap          -> events
learned      what gateways learned about workers without events          -> served elsewhere
bookings     what the other gateways have booked                         -> peers' bookings
drains       which workers operators of any gateway drain                -> drains
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from gateway.config import GatewayConfig
from gateway.discovery.redis import RedisDiscovery
from gateway.feeds.base import FedAndSharing
from gateway.feeds.bookings import BookingExchange
from gateway.feeds.drains import SharedDrains
from gateway.feeds.learnedfeed import LearnedFeed
from gateway.feeds.redisfeed import CheckpointLoader, LogFollower
from gateway.feeds.registry import RegistryWatch
from gateway.feeds.roads import Roads
from gateway.feeds.tasks import TaskSet
from gateway.feeds.tending import Tender
from gateway.index.replica import Replica
from gateway.index.stats import FeedStats
from shared.rediskeys import RedisKeys
from shared.redislink import RedisLink
from shared.types import WorkerId


class RedisSide:
    """Owned by the feeds of a gateway that has a Redis.

    :param gateway_id: name of this process among all gateways of the deployment.
    :raises ConfigError: the Redis URL is none.
    """

    def __init__(
        self,
        config: GatewayConfig,
        router: FedAndSharing,
        replica: Replica,
        gateway_id: str,
        stats: FeedStats,
        *,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._stats, self._clock, self._rng = stats, clock, rng
        keys = self._keys = RedisKeys(config.deployment.name)
        url, timeout_s = config.redis.url, config.redis.timeout_ms / 1000

        def link() -> RedisLink:
            return RedisLink(url, timeout_s, "headwater-gateway")

        self._registrations = link()
        self._log = LogFollower(link(), keys, replica, stats, clock, rng)
        self._checkpoints = CheckpointLoader(link(), keys, replica, stats, clock, rng)
        self._bookings = BookingExchange(link(), keys, router, gateway_id, stats, clock, rng)
        self._learned = LearnedFeed(
            link(), keys, router, replica, gateway_id, stats, clock=clock, rng=rng
        )
        self.drains = SharedDrains(link(), keys, router, clock=clock, rng=rng)

    def start(self, tasks: TaskSet, tender: Tender, roads: Roads) -> None:
        """Begin in the background; waits for nobody."""
        roads.checkpoints = self._checkpoints
        tender.registered.on_departed = self.drains.departed
        tender.on_new = self._met
        watch = RegistryWatch(
            self._registrations,
            RedisDiscovery(self._keys),
            self._stats,
            tender.registered.looked,
            self._clock,
            self._rng,
        )
        tasks.spawn("registry", watch.run)
        tasks.spawn("learned", self._learned.run)
        tasks.spawn("log", self._log.run)
        tasks.spawn("checkpoints", self._checkpoints.run)
        tasks.spawn("bookings", self._bookings.run)
        tasks.spawn("drains", self.drains.run)

    def _met(self, worker: WorkerId) -> None:
        """It joined, or joined again."""
        self._log.rewind(worker)
        self.drains.met(worker)
