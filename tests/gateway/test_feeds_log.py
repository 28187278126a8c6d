"""Following the log, watching the registrations and exchanging bookings over a fake link."""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random

import pytest
from redis.exceptions import ResponseError

from gateway.decision import Booked
from gateway.feeds import redisfeed
from gateway.feeds.bookings import BookingExchange, encode_bookings
from gateway.feeds.redisfeed import CheckpointLoader, LogFollower
from gateway.feeds.registry import RegistryWatch
from gateway.feeds.tasks import TaskSet
from gateway.index.base import Applied
from gateway.index.redis import LOOKBACK_MS
from gateway.index.replica import Replica
from gateway.index.stats import FeedStats
from gateway.routing.pressure import Flow, Flows
from shared.blocks import pack_keys
from shared.events import EventBatch, encode_batch, stored
from shared.load import WorkerInfo
from shared.rediskeys import CHUNKS, RedisKeys
from shared.redislink import RedisLost

KEYS = RedisKeys("t", shards=2)
SHARD = KEYS.shard_of("w")


class FakeRedis:
    """Answers like a server whose clock is far from ours; raises when told to."""

    def __init__(self) -> None:
        self.server_s = 1_000_000.0
        self.role: object = [b"master", 0, []]
        self.last: dict[int, bytes] = {}
        self.reads: deque[object] = deque()
        self.asked: list[tuple] = []
        self.dropped = asyncio.Event()
        self.values: dict[str, object] = {}
        self.lives: dict[str, object] = {}
        """Milliseconds that a key still lives; of others nothing is known."""

    cluster = False

    async def call(self, commands, wait_s: float = 0.0, *, at=None):
        await asyncio.sleep(0)
        self.asked += commands
        return [self._answer(command) for command in commands]

    async def at_once(self, commands, wait_s: float = 0.0, *, at=None):
        """As :meth:`call`, without a turn for anybody else."""
        self.asked += commands
        return [self._answer(command) for command in commands]

    async def drop(self) -> None:
        self.dropped.set()

    def _answer(self, command):
        name = command[0]
        if name == "ROLE":
            return self.role
        if name == "TIME":
            return [b"%d" % int(self.server_s), b"0"]
        if name == "XINFO":
            shard = next(s for s in range(KEYS.shards) if KEYS.log(s) == command[2])
            if shard not in self.last:
                return ResponseError("no such key")
            return [b"length", 1, b"last-generated-id", self.last[shard]]
        if name == "XREAD":
            if not self.reads:
                raise RedisLost("the test has ended")
            return self.reads.popleft()
        if name == "MGET":
            return [self.values.get(key) for key in command[1:]]
        if name == "PTTL":
            return self.lives.get(command[1], -1)
        if name == "HMGET":
            return self.values.get(command[1], [None, None])
        return self.values.get(name)

    def cursors(self) -> list[dict[str, bytes]]:
        read = [command[6:] for command in self.asked if command[0] == "XREAD"]
        halves = [len(streams) // 2 for streams in read]
        return [dict(zip(r[:n], r[n:], strict=True)) for r, n in zip(read, halves, strict=True)]


class Rig:
    def __init__(self) -> None:
        self.now = 50.0
        self.redis = FakeRedis()
        self.stats = FeedStats()
        self.seen: list[int] = []
        self.replica = Replica(self._apply, self.stats)
        self.replica.follow(WorkerInfo("w", 1, "http://w", ("m",)))
        self.follower = LogFollower(
            self.redis, KEYS, self.replica, self.stats, lambda: self.now, Random(1)
        )

    def _apply(self, batch, now):
        self.seen.append(batch.seq)
        return Applied(True, "applied")

    def entry(self, seq: int, at_s: float, data: bytes | None = None):
        batch = EventBatch("w", 1, "worker", seq, 0.0, 1, (stored([seq], None),))
        return [b"%d-0" % int(at_s * 1000), [b"b", data or encode_batch(batch)]]

    def page(self, *entries):
        return [[KEYS.log(SHARD).encode(), list(entries)]]

    async def follow(self) -> None:
        """Until the reads are used up."""
        self.redis.dropped.clear()
        task = asyncio.create_task(self.follower.run())
        await self.redis.dropped.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_reading_begins_before_the_oldest_checkpoint(rig: Rig) -> None:
    rig.redis.reads.append(None)
    await rig.follow()
    start = b"%d-0" % (1_000_000_000 - LOOKBACK_MS)
    assert rig.redis.cursors()[0] == {KEYS.log(SHARD): start}
    assert rig.stats.index_lag_s == 0.0


async def test_reading_goes_on_where_it_was_and_lag_is_in_the_servers_clock(rig: Rig) -> None:
    rig.redis.reads += [None, rig.page(rig.entry(1, 999_999.5))]
    await rig.follow()
    assert rig.seen == [1]
    assert rig.stats.index_lag_s == pytest.approx(0.5)
    rig.redis.reads.append(None)
    await rig.follow()
    assert rig.redis.cursors()[-1][KEYS.log(SHARD)] == b"999999500-0"


async def test_what_cannot_be_decoded_is_counted_and_passed(rig: Rig) -> None:
    page = rig.page(rig.entry(1, 999_999), rig.entry(0, 999_999, b"\xc1"), rig.entry(2, 999_999))
    rig.redis.reads.append(page)
    await rig.follow()
    assert rig.seen == [1, 2]
    assert rig.stats.decode_errors == 1


async def test_another_log_is_read_from_its_past(rig: Rig) -> None:
    """After a failover to a server whose log ends before our place."""
    rig.redis.reads += [None, rig.page(rig.entry(1, 999_999))]
    rig.redis.last[SHARD] = b"999999000-0"
    await rig.follow()
    assert rig.stats.cursor_resets == 0
    rig.redis.last[SHARD] = b"999000000-0"
    rig.redis.reads.append(None)
    await rig.follow()
    assert rig.stats.cursor_resets == 1
    assert rig.redis.cursors()[-1][KEYS.log(SHARD)] == b"%d-0" % (1_000_000_000 - LOOKBACK_MS)


async def test_a_log_read_far_too_late_is_skipped(rig: Rig) -> None:
    rig.redis.reads += [None, rig.page(rig.entry(1, 999_000)), None]
    await rig.follow()
    assert rig.stats.cursor_resets == 1
    assert rig.redis.cursors()[-1][KEYS.log(SHARD)] == b"999999000-0"


async def test_the_past_that_is_read_on_purpose_is_no_lag(rig: Rig) -> None:
    rig.redis.reads += [rig.page(rig.entry(1, 999_970)), rig.page(rig.entry(2, 999_980))]
    await rig.follow()
    assert rig.seen == [1, 2]
    assert (rig.stats.cursor_resets, rig.stats.index_lag_s) == (0, 0.0)


async def turns(count: int = 100) -> None:
    """For others on the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


OTHER = next(name for name in "abcdefgh" if KEYS.shard_of(name) != SHARD)


async def test_a_new_worker_rewinds_only_its_shard(rig: Rig) -> None:
    rig.replica.follow(WorkerInfo(OTHER, 1, "http://o", ("m",)))
    rig.redis.reads += [None, rig.page(rig.entry(1, 999_999)), None]
    await rig.follow()
    rig.follower.rewind(OTHER)
    rig.redis.reads.append(None)
    before = rig.redis.cursors()[-1]
    await rig.follow()
    after = rig.redis.cursors()[-1]
    assert after[KEYS.log(1 - SHARD)] == b"%d-0" % (1_000_000_000 - LOOKBACK_MS)
    assert after[KEYS.log(SHARD)] == before[KEYS.log(SHARD)] == b"999999000-0"


async def test_shards_are_read_while_they_have_a_worker_with_events(rig: Rig) -> None:
    rig.replica.follow(WorkerInfo(OTHER, 1, "http://o", ("m",), event_feed=False))
    rig.redis.reads.append(None)
    await rig.follow()
    assert set(rig.redis.cursors()[-1]) == {KEYS.log(SHARD)}
    rig.replica.follow(WorkerInfo(OTHER, 2, "http://o", ("m",)))
    rig.replica.forget("w")
    rig.redis.reads.append(None)
    await rig.follow()
    assert rig.redis.cursors()[-1] == {KEYS.log(1 - SHARD): b"%d-0" % (1_000_000_000 - LOOKBACK_MS)}


async def test_without_workers_redis_counts_as_read_and_the_first_is_read_from_its_past(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redisfeed, "BLOCK_S", 0.0)
    rig.replica.forget("w")
    task = asyncio.create_task(rig.follower.run())
    await turns()
    assert rig.replica.redis_at == rig.now
    assert rig.redis.cursors() == []
    rig.replica.follow(WorkerInfo("w", 1, "http://w", ("m",)))
    rig.follower.rewind("w")
    rig.redis.reads.append(rig.page(rig.entry(1, 999_999)))
    await turns()
    assert rig.seen == [1]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    start = b"%d-0" % (1_000_000_000 - LOOKBACK_MS)
    assert rig.redis.cursors()[0] == {KEYS.log(SHARD): start}


async def test_a_worker_that_joins_while_servers_are_asked_is_not_forgotten(rig: Rig) -> None:
    asked = rig.redis.call

    async def call(commands, wait_s: float = 0.0, *, at=None):
        if commands[0][0] == "TIME":
            rig.replica.follow(WorkerInfo(OTHER, 1, "http://o", ("m",)))
            rig.follower.rewind(OTHER)
        return await asked(commands, wait_s, at=at)

    rig.redis.call = call
    rig.redis.reads += [None, None]
    await rig.follow()
    assert set(rig.redis.cursors()[0]) == {KEYS.log(SHARD)}
    assert rig.redis.cursors()[1][KEYS.log(1 - SHARD)] == b"%d-0" % (1_000_000_000 - LOOKBACK_MS)


@pytest.mark.parametrize("trouble", ["replica", "error"])
async def test_a_server_that_cannot_be_used_is_left(rig: Rig, trouble: str) -> None:
    if trouble == "replica":
        rig.redis.role = [b"slave", b"h", 1]
    else:
        rig.redis.reads.append(ResponseError("WRONGTYPE"))
    await rig.follow()
    assert rig.seen == []
    assert rig.replica.redis_at is None or trouble == "error"


async def load_checkpoint(rig: Rig, *, wishes: int = 1) -> CheckpointLoader:
    loader = CheckpointLoader(rig.redis, KEYS, rig.replica, rig.stats, lambda: rig.now, Random(1))
    for _ in range(wishes):
        loader.want("w")
    task = asyncio.create_task(loader.run())
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return loader


async def test_a_checkpoint_is_loaded_once_for_many_wishes(rig: Rig) -> None:
    rig.redis.values[KEYS.manifest("w", 1)] = [b"1", b"4", b"0"]
    for chunk in range(CHUNKS):
        rig.redis.values[KEYS.chunk("w", 1, chunk)] = pack_keys([])
    loader = await load_checkpoint(rig, wishes=5)
    assert rig.seen == [4]
    assert rig.stats.checkpoint_resyncs == 1
    assert loader.insufficient == set()
    loader.want("w")
    assert loader._wanted.empty(), "not again so soon"
    rig.now += redisfeed.RELOAD_S
    loader.want("w")
    assert not loader._wanted.empty()


async def test_without_a_checkpoint_the_worker_must_be_asked(rig: Rig) -> None:
    loader = await load_checkpoint(rig)
    assert loader.insufficient == {"w"}
    loader.settled("w")
    assert loader.insufficient == set()


class Shares:
    def __init__(self) -> None:
        self.peers: dict = {}
        self.told: dict = {}
        self.heard: dict = {}

    def bookings(self, now):
        return {"w": Booked(1.0, 10, 1)}

    def apply_peer_bookings(self, gateway, booked, told) -> None:
        self.peers[gateway], self.told[gateway] = booked, told

    def flows(self, now):
        return Flows({"w": Flow(1.0, 0.25, 0.5, 0.125)}, {"m": 0.5})

    def apply_peer_flows(self, gateway, flows) -> None:
        self.heard[gateway] = flows


async def test_bookings_are_exchanged_and_forgotten(rig: Rig) -> None:
    shares = Shares()
    exchange = BookingExchange(rig.redis, KEYS, shares, "me", rig.stats, lambda: rig.now, Random(1))
    rig.redis.values["SMEMBERS"] = [b"me", b"you", b"odd"]
    rig.redis.values[KEYS.bookings("you")] = encode_bookings({"w": Booked(2.0, 20, 2)})
    rig.redis.values[KEYS.bookings("odd")] = b"\xc1"
    await exchange.exchange()
    assert shares.peers == {"you": {"w": Booked(2.0, 20, 2)}}
    assert (rig.stats.peers, rig.stats.decode_errors) == (1, 1)
    written = next(command for command in rig.redis.asked if command[0] == "SET")
    assert written[1:] == (KEYS.bookings("me"), encode_bookings(shares.bookings(0)), "PX", 2000)
    del rig.redis.values[KEYS.bookings("you")]
    await exchange.exchange()
    assert shares.peers == {"you": {}}
    assert ("SREM", KEYS.gateways(), "you") in rig.redis.asked
    assert rig.stats.peers == 0


@pytest.mark.parametrize(
    ("left_ms", "age_s"),
    [(2000, 0.0), (1600, 0.4), (1, 1.999), (0, 2.0), (2500, 0.0), (-1, 0.0), (-2, 0.0), (b"", 0.0)],
)
async def test_bookings_are_as_old_as_their_value(rig: Rig, left_ms, age_s) -> None:
    shares = Shares()
    exchange = BookingExchange(rig.redis, KEYS, shares, "me", rig.stats, lambda: rig.now, Random(1))
    rig.redis.values["SMEMBERS"] = [b"you", b"fresh"]
    for peer, left in (("you", left_ms), ("fresh", 2000)):
        rig.redis.values[KEYS.bookings(peer)] = encode_bookings({"w": Booked(2.0, 20, 2)})
        rig.redis.lives[KEYS.bookings(peer)] = left
    await exchange.exchange()
    assert shares.told == {"you": pytest.approx(rig.now - age_s), "fresh": rig.now}


@pytest.mark.parametrize(("ours", "theirs", "asks"), [(0, 0, 4), (1, 0, 20), (0, 1, 20)])
async def test_while_anybody_has_work_it_is_told_at_once(
    rig: Rig, monkeypatch, ours, theirs, asks
) -> None:
    shares, ends = Shares(), rig.now + 1.99
    work = {"w": Booked(1.0, 10, 1)}
    monkeypatch.setattr(shares, "bookings", lambda now: work if ours else {})

    async def sleep(seconds: float) -> None:
        rig.now += seconds
        if rig.now > ends:
            raise RuntimeError("the test has ended")

    exchange = BookingExchange(rig.redis, KEYS, shares, "me", rig.stats, lambda: rig.now, Random(1))
    rig.redis.values["SMEMBERS"] = [b"me", b"you"]
    rig.redis.values[KEYS.bookings("you")] = encode_bookings(work if theirs else {})
    with monkeypatch.context() as patched:
        patched.setattr("gateway.feeds.bookings.asyncio.sleep", sleep)
        patched.setattr(FakeRedis, "call", FakeRedis.at_once)
        with pytest.raises(RuntimeError, match="has ended"):
            await exchange.run()
    sent = [command[:2] for command in rig.redis.asked]
    assert sent.count(("SET", KEYS.bookings("me"))) == asks
    assert sent.count(("MGET", KEYS.bookings("you"))) == asks
    assert sent.count(("SET", KEYS.offered("me"))) == 4, "which changes slowly"


async def test_that_work_has_ended_is_told_as_well(rig: Rig, monkeypatch) -> None:
    shares, slept = Shares(), []
    monkeypatch.setattr(shares, "bookings", lambda now: {} if slept[2:] else {"w": Booked(1, 1, 1)})

    async def sleep(seconds: float) -> None:
        rig.now += seconds
        slept.append(seconds)
        if len(slept) == 5:
            raise RuntimeError("the test has ended")

    exchange = BookingExchange(rig.redis, KEYS, shares, "me", rig.stats, lambda: rig.now, Random(1))
    rig.redis.values["SMEMBERS"] = [b"me", b"you"]
    rig.redis.values[KEYS.bookings("you")] = encode_bookings({})
    with monkeypatch.context() as patched:
        patched.setattr("gateway.feeds.bookings.asyncio.sleep", sleep)
        patched.setattr(FakeRedis, "call", FakeRedis.at_once)
        with pytest.raises(RuntimeError, match="has ended"):
            await exchange.run()
    ours = ("SET", KEYS.bookings("me"))
    told = [command[2] for command in rig.redis.asked if command[:2] == ours]
    assert told[-1] == encode_bookings({})
    assert len(told) == 4  # the last one only once


async def test_what_gateways_send_per_second_is_told_and_forgotten_with_them(rig: Rig) -> None:
    shares = Shares()
    exchange = BookingExchange(rig.redis, KEYS, shares, "me", rig.stats, lambda: rig.now, Random(1))
    await exchange.exchange()
    [value] = [command[2] for command in rig.redis.asked if command[1:2] == (KEYS.offered("me"),)]
    rig.redis.values["SMEMBERS"] = [b"you", b"old", b"odd"]
    for peer in ("you", "old", "odd"):
        rig.redis.values[KEYS.bookings(peer)] = encode_bookings({})
    rig.redis.values[KEYS.offered("you")] = value
    rig.redis.values[KEYS.offered("odd")] = b"\xc1"
    await exchange.exchange()
    assert shares.heard == {"you": shares.flows(0.0)}, "an earlier version tells nothing"
    assert rig.stats.decode_errors == 1
    rig.now += 2.1
    exchange.expire()
    assert shares.heard == {"you": None, "old": None, "odd": None}


async def test_a_right_that_is_missing_is_an_outage_in_words(rig: Rig) -> None:
    exchange = BookingExchange(
        rig.redis, KEYS, Shares(), "me", rig.stats, lambda: rig.now, Random(1)
    )
    rig.redis.values["SMEMBERS"] = [b"you"]
    rig.redis.values[KEYS.bookings("you")] = encode_bookings({})
    rig.redis.lives[KEYS.bookings("you")] = ResponseError("NOPERM pttl")
    with pytest.raises(RedisLost, match="NOPERM pttl"):
        await exchange.exchange()


async def test_peers_are_forgotten_during_an_outage(rig: Rig) -> None:
    shares = Shares()
    exchange = BookingExchange(rig.redis, KEYS, shares, "me", rig.stats, lambda: rig.now, Random(1))
    rig.redis.values["SMEMBERS"] = [b"you"]
    rig.redis.values[KEYS.bookings("you")] = encode_bookings({"w": Booked(2.0, 20, 2)})
    await exchange.exchange()
    rig.now += 1.9
    exchange.expire()
    assert shares.peers["you"]
    rig.now += 0.2
    exchange.expire()
    assert shares.peers["you"] == {}


async def test_a_refused_write_is_an_outage_of_the_exchange(rig: Rig) -> None:
    exchange = BookingExchange(
        rig.redis, KEYS, Shares(), "me", rig.stats, lambda: rig.now, Random(1)
    )
    rig.redis.values["SET"] = ResponseError("OOM")
    with pytest.raises(RedisLost, match="OOM"):
        await exchange.exchange()


class NoDiscovery:
    async def look(self, link):
        raise RedisLost("gone")


async def test_a_replica_is_refused_in_words(rig: Rig) -> None:
    watch = RegistryWatch(
        rig.redis, NoDiscovery(), rig.stats, lambda look, since: None, lambda: rig.now, Random(1)
    )
    rig.redis.role = [b"slave"]
    with pytest.raises(RedisLost, match="replica"):
        await watch.look_once()
    # In a Cluster writes are sent on to the master by the replica itself.
    rig.redis.cluster = True
    with pytest.raises(RedisLost, match="gone"):
        await watch.look_once()


async def test_a_task_that_fails_is_counted_and_begins_anew(monkeypatch) -> None:
    monkeypatch.setattr("gateway.feeds.tasks.RESTART_S", 0.0)
    stats = FeedStats()
    tasks, runs, done = TaskSet(stats), [], asyncio.Event()

    async def body() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise KeyError("a bug")
        done.set()

    tasks.spawn("x", body)
    tasks.spawn("x", body)
    await done.wait()
    await asyncio.sleep(0)
    assert (len(runs), stats.task_failures) == (3, 2)
    assert "x" not in tasks


async def test_closing_ends_a_task_that_swallows_a_cancellation() -> None:
    tasks, swallowed = TaskSet(FeedStats()), []

    async def body() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed.append(1)
                if len(swallowed) == 2:
                    raise

    tasks.spawn("x", body)
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.close(), 5)
    assert len(swallowed) == 2
