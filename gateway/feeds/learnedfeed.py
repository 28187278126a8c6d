"""Telling the other gateways what was learned about workers without cache events, and listening.

Each shard has a short stream of facts beside its log. It is read from its beginning when a worker
is new, so a gateway that starts late does not begin blind. Facts are numbered by their teller; what
comes twice (a connection that was opened anew reads from the beginning, too) is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import msgspec

from gateway.feeds.base import SharesLearned
from gateway.feeds.redisfeed import SLICE_S
from gateway.feeds.retrying import repeat
from gateway.index.redis import LogEntry, parse_entries
from gateway.index.replica import Replica
from gateway.index.stats import FeedStats
from gateway.learned import Fact, Told, decode, encode
from shared.rediskeys import FIELD_BATCH, LEARNED_MAXLEN, LOG_TTL_MS, Command, RedisKeys
from shared.redislink import RedisLink, RedisLost
from shared.types import WorkerId

EVERY_S = 0.1
TOLD_PER_TRIP = 200
READ_PER_SHARD = 32
TELLERS_LIMIT = 65_536
"""(gateway, worker) pairs whose last number is remembered."""


class LearnedFeed:
    """Owned by the feeds; sleeps while every worker has an event feed of its own."""

    def __init__(
        self,
        link: RedisLink,
        keys: RedisKeys,
        router: SharesLearned,
        replica: Replica,
        gateway_id: str,
        stats: FeedStats,
        *,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._link, self._keys, self._router, self._replica = link, keys, router, replica
        self._id, self._stats, self._clock, self._rng = gateway_id, stats, clock, rng
        self._workers: set[WorkerId] = set()
        self._cursors: dict[int, bytes] = {}
        self._numbers: dict[WorkerId, int] = {}
        self._heard: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        """Exchange for ever; an outage only means that others hear of it no more."""

        async def turn() -> None:
            more = await self.exchange()
            await asyncio.sleep(0 if more else EVERY_S)

        await repeat(self._link, turn, self._lost, self._rng)

    def _lost(self, _: RedisLost) -> None:
        self._cursors.clear()
        self._workers.clear()
        self._router.drop_learned()

    async def exchange(self) -> bool:
        """Tell ours, hear theirs: one round trip; none without such workers. True: more is left."""
        self._notice_workers()
        telling = self._telling()
        reading: list[Command] = [
            ("XREAD", "COUNT", READ_PER_SHARD, "STREAMS", self._keys.learned(shard), cursor)
            for shard, cursor in self._cursors.items()
        ]
        if not telling and not reading:
            return False
        replies = await self._link.call([*telling, *reading])
        for reply in replies:
            if isinstance(reply, Exception):
                raise RedisLost(f"learned: {reply}")
        more = False
        for reply in replies[len(telling) :]:
            entries = parse_entries(self._keys, reply)
            more = more or len(entries) == READ_PER_SHARD
            await self._hear(entries)
        return more

    def _notice_workers(self) -> None:
        known = {f.info.id for f in self._replica if not f.info.event_feed}
        for worker in known - self._workers:
            # What was told of it before it was known here was skipped.
            self._cursors[self._keys.shard_of(worker)] = b"0-0"
        gone = {worker for _, worker in self._heard} - known if self._workers - known else set()
        if gone:
            # If it comes back, all that is told of it is news again.
            self._heard = {k: n for k, n in self._heard.items() if k[1] not in gone}
        self._workers = known
        shards = {self._keys.shard_of(worker) for worker in known}
        self._cursors = {s: cursor for s, cursor in self._cursors.items() if s in shards}

    def _telling(self) -> list[Command]:
        commands: list[Command] = []
        shards = set()
        for fact in self._router.learned(TOLD_PER_TRIP):
            worker = WorkerId(fact.worker)
            shard = self._keys.shard_of(worker)
            number = self._numbers[worker] = self._numbers.get(worker, 0) + 1
            data = encode(Told(self._id, number, fact))
            stream = self._keys.learned(shard)
            commands.append(("XADD", stream, "MAXLEN", "~", LEARNED_MAXLEN, "*", FIELD_BATCH, data))
            shards.add(shard)
        commands += [("PEXPIRE", self._keys.learned(shard), LOG_TTL_MS) for shard in shards]
        return commands

    async def _hear(self, entries: list[LogEntry]) -> None:
        turn = self._clock()
        for entry in entries:
            self._cursors[entry.shard] = entry.id
            try:
                told = decode(entry.value())
            except (msgspec.DecodeError, RecursionError):
                self._stats.decode_errors += 1
                continue
            self._take(told.gateway, told.number, told.fact)
            if self._clock() - turn > SLICE_S:
                await asyncio.sleep(0)
                turn = self._clock()

    def _take(self, gateway: str, number: int, fact: Fact) -> None:
        if gateway == self._id or fact.worker not in self._workers:
            return
        teller = (gateway, fact.worker)
        if number <= self._heard.get(teller, 0):
            return
        if len(self._heard) > TELLERS_LIMIT:
            self._heard.clear()
        self._heard[teller] = number
        self._stats.learned_from_peers += 1
        self._router.apply_learned(fact)
