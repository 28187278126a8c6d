"""A worker stand-in that speaks both roads of the event protocol, and a router that remembers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from types import SimpleNamespace

import msgspec
import pytest
from aiohttp import web
from redis.asyncio import Redis
from redis.exceptions import RedisError
from stopwatch import Limit, Stopwatch

from gateway.config import GatewayConfig, WorkersConfig
from gateway.feeds import Feeds
from gateway.index.table import PrefixTable
from gateway.routing.pressure import Flows
from shared import rediskeys
from shared.blocks import pack_keys
from shared.events import EventBatch, Snapshot, encode_batch, removed, stored
from shared.load import WorkerInfo, WorkerLoad
from shared.rediskeys import RedisKeys
from shared.settings import DeploymentConfig, RedisConfig

KEYS = RedisKeys("t")


async def until(check: Callable[[], object], timeout_s: float = 10.0) -> float:
    """Seconds until ``check`` was true."""
    clock, limit = Stopwatch(), Limit(timeout_s)
    while not check():
        assert not limit.over(), "it did not happen in time"
        await asyncio.sleep(0.01)
    return clock.seconds()


class NotingRouter:
    """The real index; everything else is only noted."""

    def __init__(self) -> None:
        self.index = PrefixTable(1_000_000, Random(1))
        self.infos: dict = {}
        self.health: dict = {}
        self.trust: dict = {}
        self.parity: dict = {}
        self.loads: dict = {}
        self.left: list = []
        self.draining: set = set()
        self.peers: dict = {}
        self.told: dict = {}
        self.flows_of: dict = {}
        self.own: dict = {}

    def join(self, info, now) -> None:
        self.infos[info.id] = info
        self.index.join(info.id, info.epoch, info.block_size // 16 or 1)

    def leave(self, worker, now, reason) -> None:
        self.left.append((worker, reason))
        for book in (self.infos, self.health, self.trust, self.loads):
            book.pop(worker, None)
        self.index.forget(worker)

    def set_health(self, worker, healthy, now, reason) -> None:
        self.health[worker] = healthy

    def note_parity(self, worker, parity, now) -> None:
        self.parity[worker] = parity

    def set_trust(self, worker, trust, reason, now) -> None:
        self.trust[worker] = (str(trust), reason)

    def drain(self, worker, now, by="operator", why="") -> bool:
        self.draining.add(worker)
        return True

    def undrain(self, worker, now, by="operator") -> bool:
        self.draining.discard(worker)
        return True

    def apply_load(self, worker, load, now) -> None:
        self.loads[worker] = load

    def apply_events(self, batch, now):
        return self.index.apply(batch)

    def bookings(self, now):
        return self.own

    def apply_peer_bookings(self, gateway, booked, told) -> None:
        self.peers[gateway] = booked
        self.told[gateway] = told

    def flows(self, now):
        return Flows()

    def apply_peer_flows(self, gateway, flows) -> None:
        self.flows_of[gateway] = flows

    def learned(self, limit):
        return ()

    def drop_learned(self) -> None:
        pass

    def apply_learned(self, fact) -> None:
        raise AssertionError("every worker here has events")

    def holds(self, worker, contents) -> bool:
        """The index has exactly these single-block contents for a worker."""
        if self.index.blocks(worker) != len(contents):
            return False
        return all(worker in self.index.match([key]) for key in contents)

    def exact(self, worker, road: str = "") -> bool:
        trust, reason = self.trust.get(worker, ("", ""))
        return trust == "exact" and road in reason


class StandIn:
    """One worker incarnation after the other under one name and port."""

    def __init__(self, port: int, name: str = "", redis_url: str | None = None) -> None:
        self.port, self.redis_url = port, redis_url
        self.name = name or f"127.0.0.1:{port}"
        self.heartbeat_s = 0.3
        self.ready = True
        self.hang = False
        self.load = WorkerLoad()
        self.requests: list[str] = []
        self._beat: asyncio.Task | None = None
        self._runner: web.AppRunner | None = None
        self._redis: Redis | None = None
        self.begin_again()

    def begin_again(self) -> None:
        """Another process at the same place: new epoch, empty cache."""
        self.epoch = int(time.time() * 1e3) << 16 | Random().getrandbits(16)
        self.seq = 0
        self.contents: set[int] = set()
        self.batches: list[EventBatch] = []
        self.changed = asyncio.Event()
        self.drop_next = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.epoch, self.url, ("m",), blocks_total=1000)

    # -------------------------------------------------------------- HTTP

    async def listen(self) -> None:
        app = web.Application()
        app.router.add_get("/headwater/info", self._json(lambda: self.info))
        app.router.add_get("/headwater/load", self._json(lambda: self.load))
        app.router.add_get("/headwater/events", self._events)
        app.router.add_get("/ready", self._is_ready)
        app.on_shutdown.append(self._wake)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _wake(self, app) -> None:
        self.changed.set()

    def _json(self, value):
        async def answer(request: web.Request) -> web.Response:
            self.requests.append(request.path)
            if self.hang:
                await asyncio.sleep(60)
            return web.Response(body=msgspec.json.encode(value()), content_type="application/json")

        return answer

    async def _is_ready(self, request: web.Request) -> web.Response:
        if self.hang:
            await asyncio.sleep(60)
        if self.ready:
            return web.json_response({"ready": True})
        return web.json_response({"ready": False, "reasons": ["loading"]}, status=503)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request.path)
        response = web.StreamResponse()
        await response.prepare(request)
        same = request.query.get("epoch") == str(self.epoch)
        position = int(request.query["after"]) if same else None
        if position is None:
            position = self.seq
            await self._frame(response, self._snapshot())
        with suppress(ConnectionResetError):
            await self._stream(response, position)
        return response

    async def _stream(self, response: web.StreamResponse, position: int) -> None:
        epoch = self.epoch
        while epoch == self.epoch:
            for batch in self.batches[position:]:
                await self._frame(response, batch)
                position = batch.seq
            self.changed.clear()
            try:
                async with asyncio.timeout(0.3):
                    await self.changed.wait()
            except TimeoutError:
                await response.write(bytes(4))

    @staticmethod
    async def _frame(response: web.StreamResponse, batch: EventBatch) -> None:
        data = encode_batch(batch)
        await response.write(len(data).to_bytes(4, "little") + data)

    def _snapshot(self) -> EventBatch:
        packed = pack_keys(sorted(self.contents))
        return EventBatch(self.name, self.epoch, "worker", self.seq, 0.0, 1, (Snapshot(packed),))

    async def hang_up(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # -------------------------------------------------------------- cache and Redis

    async def store(self, *keys: int) -> None:
        self.contents |= set(keys)
        await self._publish(stored(list(keys), None))

    async def evict(self, *keys: int) -> None:
        self.contents -= set(keys)
        await self._publish(removed(list(keys)))

    async def _publish(self, event) -> None:
        self.seq += 1
        batch = EventBatch(self.name, self.epoch, "worker", self.seq, 0.0, 1, (event,))
        self.batches.append(batch)
        self.changed.set()
        if self.drop_next > 0:
            self.drop_next -= 1
        elif self._redis is not None:
            log = KEYS.log(KEYS.shard_of(self.name))
            try:
                await self._redis.xadd(log, {rediskeys.FIELD_BATCH: encode_batch(batch)})
            except (RedisError, OSError):
                return

    async def register(self) -> None:
        assert self.redis_url is not None
        self._redis = Redis.from_url(self.redis_url, socket_timeout=0.5, socket_connect_timeout=0.5)
        await self.beat()
        await self.checkpoint()
        self._beat = asyncio.create_task(self._beat_on())

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            try:
                await self.beat()
                assert self._redis is not None
                if not await self._redis.exists(KEYS.manifest(self.name, self.epoch)):
                    await self.checkpoint()
            except (RedisError, OSError):
                continue

    async def beat(self) -> None:
        assert self._redis is not None
        async with self._redis.pipeline(transaction=True) as pipe:
            name = KEYS.worker(self.name)
            pipe.hset(
                name,
                mapping={
                    "info": msgspec.json.encode(self.info),
                    "load": msgspec.json.encode(self.load),
                    "epoch": self.epoch,
                    "seq": self.seq,
                },
            )
            pipe.pexpire(name, rediskeys.LEASE_MS)
            pipe.sadd(KEYS.members(KEYS.shard_of(self.name)), self.name)
            await pipe.execute()

    async def checkpoint(self) -> None:
        assert self._redis is not None
        async with self._redis.pipeline(transaction=True) as pipe:
            for chunk in range(rediskeys.CHUNKS):
                part = sorted(key for key in self.contents if key >> 60 == chunk)
                pipe.set(KEYS.chunk(self.name, self.epoch, chunk), pack_keys(part), px=60_000)
            manifest = KEYS.manifest(self.name, self.epoch)
            pipe.hset(manifest, mapping={"epoch": self.epoch, "seq": self.seq})
            await pipe.execute()

    async def withdraw(self) -> None:
        """A clean end: the lease is taken back."""
        await self.die()
        redis = Redis.from_url(self.redis_url)
        await redis.delete(KEYS.worker(self.name))
        await redis.srem(KEYS.members(KEYS.shard_of(self.name)), self.name)
        await redis.aclose()

    async def die(self) -> None:
        """As kill -9: no more beats, nobody listens; what is in Redis stays."""
        if self._beat is not None:
            # More than once: redis-py sends by asyncio.wait_for, which can swallow a cancellation.
            while not self._beat.done():
                self._beat.cancel()
                await asyncio.wait({self._beat}, timeout=0.1)
            self._beat = None
        if self._redis is not None:
            await self._redis.aclose()
            self._redis = None
        await self.hang_up()


def settings(redis_url: str = "none", *urls: str, timeout_ms=300, **workers) -> GatewayConfig:
    workers = {"health_interval_s": 0.3, "health_timeout_s": 0.5, **workers}
    return GatewayConfig(
        workers=WorkersConfig(urls=urls, **workers),
        redis=RedisConfig(url=redis_url, timeout_ms=timeout_ms),
        deployment=DeploymentConfig(name="t"),
    )


@asynccontextmanager
async def running(config: GatewayConfig, gateway_id: str = "g1"):
    router = NotingRouter()
    feeds = Feeds(router, config, gateway_id=gateway_id)
    await feeds.start()
    try:
        yield SimpleNamespace(router=router, feeds=feeds, stats=feeds.stats)
    finally:
        await feeds.stop()


@pytest.fixture
def kit(free_port) -> SimpleNamespace:
    """Names that the tests of the feeds share."""
    return SimpleNamespace(
        until=until, running=running, settings=settings, keys=KEYS, NotingRouter=NotingRouter
    )


@pytest.fixture
async def stand_in(free_port) -> AsyncIterator[Callable[..., Awaitable[StandIn]]]:
    """``await stand_in(redis_url=None, name="")`` starts one more worker stand-in."""
    made: list[StandIn] = []

    async def start(redis_url: str | None = None, name: str = "", port: int = 0) -> StandIn:
        worker = StandIn(port or free_port(), name, redis_url)
        made.append(worker)
        await worker.listen()
        if redis_url is not None:
            await worker.register()
        return worker

    yield start
    for worker in made:
        await worker.die()
