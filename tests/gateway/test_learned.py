"""What gateways tell each other about workers without cache events."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from gateway.config import RoutingConfig
from gateway.decision import AttemptEnd
from gateway.feeds.learnedfeed import LearnedFeed
from gateway.index.replica import Replica
from gateway.index.stats import FeedStats
from gateway.index.table import PrefixTable
from gateway.learn import Served
from gateway.learned import KEYS_LIMIT, OUTBOX, Fact, Outbox, Told, decode, encode
from gateway.plugins import all_policies
from gateway.records import Outcome
from gateway.router import Router
from gateway.routing.base import Query
from shared.load import WorkerInfo
from shared.openai import Usage
from shared.rediskeys import RedisKeys
from shared.types import RequestId

KEYS = RedisKeys("t", shards=2)


class Streams:
    """A server that only has streams."""

    def __init__(self) -> None:
        self.streams: dict[str, list[tuple[bytes, bytes]]] = {}
        self.trips = 0

    async def call(self, commands, wait_s: float = 0.0, *, at=None):
        self.trips += 1
        return [getattr(self, command[0].lower())(*command[1:]) for command in commands]

    def xadd(self, stream, *rest):
        entries = self.streams.setdefault(stream, [])
        entries.append((b"%d-0" % (len(entries) + 1), rest[-1]))
        return entries[-1][0]

    def pexpire(self, *_):
        return 1

    def xread(self, _, count, __, stream, cursor):
        after = int(cursor.partition(b"-")[0])
        found = self.streams.get(stream, [])[after : after + count]
        return [[stream.encode(), [[i, [b"b", data]] for i, data in found]]] if found else None


class Gateway:
    """A router, and the feed that tells of it."""

    def __init__(self, name: str, server: Streams) -> None:
        self.router = Router(
            PrefixTable(10_000, Random(1)),
            all_policies(RoutingConfig()),
            RoutingConfig(),
            Random(1),
        )
        self.replica = Replica(self.router.apply_events, FeedStats())
        self.stats = FeedStats()
        self.feed = LearnedFeed(
            server,
            KEYS,
            self.router,
            self.replica,
            name,
            self.stats,
            clock=lambda: 0.0,
            rng=Random(1),
        )

    def join(self, name: str = "w", epoch: int = 1, **more) -> None:
        info = WorkerInfo(name, epoch, f"http://{name}", ("m",), **{"event_feed": False, **more})
        self.router.join(info, 0.0)
        self.replica.follow(info)

    def serve(self, *keys: int, cached: int | None = 0, worker: str = "w") -> None:
        """The worker has answered a prompt of these blocks."""
        prompt = len(keys) * 16 + 3
        query = Query(RequestId("r"), "m", prompt, 9, 0.0, keys)
        route = self.router.decide(query, 0.0)
        lease = self.router.begin(route, 0.0, attempt=1)
        usage = Usage(prompt, 5, cached)
        lease.finish(AttemptEnd(outcome=Outcome.OK, status=200, usage=usage), 0.0)

    def holds(self, worker: str = "w") -> int:
        return self.router._index.blocks(worker)


@pytest.fixture
def server() -> Streams:
    return Streams()


async def both(server: Streams, *, to: str = "both") -> tuple[Gateway, Gateway]:
    one, two = Gateway("one", server), Gateway("two", server)
    for gateway in (one, two) if to == "both" else (one,):
        gateway.join()
        await gateway.feed.exchange()
    return one, two


async def test_each_hears_what_the_other_served_once(server: Streams) -> None:
    one, two = await both(server)
    one.serve(1, 2, 3)
    two.serve(1, 9)
    for _ in range(3):
        for gateway in (one, two):
            await gateway.feed.exchange()
    assert one.holds() == two.holds() == 4
    assert one.stats.learned_from_peers == two.stats.learned_from_peers == 1
    # Both count the same uses, so both expire the same.
    clocks = [g.router._knowledge._learned.clock("w") for g in (one, two)]
    assert clocks[0] == clocks[1] > 0


async def test_who_knows_the_worker_late_hears_all_of_it_and_nothing_twice(server: Streams) -> None:
    one, two = await both(server, to="one")
    for start in range(0, 400, 4):
        one.serve(*range(start + 1, start + 5))
    await one.feed.exchange()
    two.join("x")
    await two.feed.exchange()
    assert two.stats.learned_from_peers == 0
    two.join()
    while await two.feed.exchange():
        pass
    assert two.holds() == 400
    two.feed._cursors = dict.fromkeys(two.feed._cursors, b"0-0")
    while await two.feed.exchange():
        pass
    assert two.stats.learned_from_peers == 100


async def test_a_restart_that_one_saw_empties_it_for_all(server: Streams) -> None:
    one, two = await both(server)
    one.serve(1, 2, 3)
    await one.feed.exchange()
    await two.feed.exchange()
    assert two.holds() == 3
    one.join(epoch=2)
    one.serve(7)
    await one.feed.exchange()
    await two.feed.exchange()
    assert one.holds() == two.holds() == 1


async def test_workers_with_events_are_not_spoken_of(server: Streams) -> None:
    one, two = Gateway("one", server), Gateway("two", server)
    for gateway in (one, two):
        gateway.join(event_feed=True)
        assert not await gateway.feed.exchange()
    one.serve(1, 2)
    assert not await one.feed.exchange()
    two.router.apply_learned(Fact("w", b"12345678"))
    assert two.holds() == 0
    assert server.trips == 0


async def test_what_is_no_fact_is_counted_and_skipped(server: Streams) -> None:
    one, two = await both(server)
    stream = KEYS.learned(KEYS.shard_of("w"))
    for data in (b"", b"\xc1", encode(Told("x", 1, Fact("w", b"123")))):
        server.xadd(stream, data)
    one.serve(5)
    await one.feed.exchange()
    await two.feed.exchange()
    assert two.stats.decode_errors == 3
    assert two.holds() == 1


def test_facts_are_bounded_and_survive_the_way() -> None:
    fact = Fact.of("w", Served(list(range(KEYS_LIMIT + 5)), 70_000, 1, 16, None))
    judged = Fact.of("w", Served([1], 17, 1, 16, 0, clock=3, slack_tokens=32))
    assert judged.served(8) == Served([1], 17, 1, 16, 0, clock=8, slack_tokens=32)
    assert fact.served(8).clock is None
    assert decode(encode(Told("g", 3, fact))) == Told("g", 3, fact)
    assert len(fact.served().keys) == KEYS_LIMIT
    assert fact.served().cached_tokens is None
    with pytest.raises(msgspec.DecodeError):
        decode(b"\x93")
    box = Outbox()
    box.put(fact)
    assert list(box.take(9)) == []
    for _ in range(OUTBOX + 7):
        box.put(fact)
    assert len(list(box.take(10**6))) == OUTBOX
