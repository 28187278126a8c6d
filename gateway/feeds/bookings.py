"""Gateways tell each other what they have booked, so that they do not all pick the same worker.

Each owns one value that is replaced twice a second, ten times while somebody has work, and dies
after two seconds: a gateway that crashed leaks nothing, and nothing can become negative. What is
read is as old as it is, up to twice that: prefills booked there have gone on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random

import msgspec
from redis.exceptions import ResponseError

from gateway.decision import Booked
from gateway.feeds.base import SharesBookings
from gateway.feeds.retrying import repeat
from gateway.index.stats import FeedStats
from gateway.routing.pressure import Flows
from shared.rediskeys import BOOKING_TTL_MS, LOG_TTL_MS, Command, RedisKeys, Reply
from shared.redislink import RedisLink, RedisLost
from shared.types import WorkerId

EVERY_S = 0.5
BUSY_S = 0.1
"""While this gateway or another has work: most prefills take longer."""
PEERS_LIMIT = 256
"""Peers read at most; more than that are never seen in one deployment."""

_ENCODER = msgspec.msgpack.Encoder()
_FLOWS_DECODER = msgspec.msgpack.Decoder(Flows)
_DECODER = msgspec.msgpack.Decoder(dict[str, tuple[float, int, int]])


def encode_bookings(booked: Mapping[WorkerId, Booked]) -> bytes:
    """``{worker: (prefill_s, decode_tokens, count)}`` as msgpack."""
    return _ENCODER.encode(
        {name: (work.prefill_s, work.decode_tokens, work.count) for name, work in booked.items()}
    )


def decode_bookings(data: bytes) -> dict[WorkerId, Booked]:
    """Inverse; raises ``msgspec.DecodeError``. Negative values count as none."""
    return {
        WorkerId(name): Booked(max(0.0, prefill_s), max(0, tokens), max(0, count))
        for name, (prefill_s, tokens, count) in _DECODER.decode(data).items()
    }


def _age_s(left_ms: Reply) -> float:
    """How long ago a value was written whose key lives so much longer: no two machines' clocks are
    compared. 0 where that is not known."""
    if not isinstance(left_ms, int) or left_ms < 0:  # it has just gone, or never goes
        return 0.0
    return max(0, BOOKING_TTL_MS - left_ms) / 1000


class BookingExchange:
    """Publishes one gateway's bookings and reads the others'."""

    def __init__(
        self,
        link: RedisLink,
        keys: RedisKeys,
        router: SharesBookings,
        gateway_id: str,
        stats: FeedStats,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._link, self._keys, self._router, self._id = link, keys, router, gateway_id
        self._stats, self._clock, self._rng = stats, clock, rng
        self._heard: dict[str, float] = {}
        self._busy: set[str] = set()
        """Those that had work when they were read last."""
        self._told = False
        """Whether what was told last was not nothing."""

    async def run(self) -> None:
        """Exchange for ever; an outage only means that the others' work is forgotten."""

        async def turn() -> None:
            await self.exchange()
            await self._between()

        await repeat(self._link, turn, lambda _: self.expire(), self._rng)

    async def _between(self) -> None:
        """Until the next exchange. Meanwhile the same, in short, while anybody has work."""
        ends = self._clock() + EVERY_S
        while True:
            await asyncio.sleep(BUSY_S)
            if ends - self._clock() < BUSY_S / 2:
                return
            peers = sorted(self._heard)
            # Having told of work, it also has to tell that there is none any more.
            if peers and (self._busy or self._told or self._router.bookings(self._clock())):
                written, *read = await self._link.call([self._ours(), *self._asking(peers)])
                self._require([written])
                await self._take(peers, read)

    def _ours(self) -> Command:
        booked = self._router.bookings(self._clock())
        self._told = bool(booked)
        key, value = self._keys.bookings(self._id), encode_bookings(booked)
        return ("SET", key, value, "PX", BOOKING_TTL_MS)

    async def exchange(self) -> None:
        """Write ours, read theirs: two round trips."""
        members = self._keys.gateways()
        flows = _ENCODER.encode(self._router.flows(self._clock()))
        publish: list[Command] = [
            self._ours(),
            ("SET", self._keys.offered(self._id), flows, "PX", BOOKING_TTL_MS),
            ("SADD", members, self._id),
            ("PEXPIRE", members, LOG_TTL_MS),
            ("SMEMBERS", members),
        ]
        *written, listed = await self._link.call(publish)
        self._require(written)
        if peers := self._peers(listed):
            offered: Command = ("MGET", *(self._keys.offered(peer) for peer in peers))
            flows, *read = await self._link.call([offered, *self._asking(peers)])
            self._hear(peers, flows)
            await self._take(peers, read)
        self.expire()

    @staticmethod
    def _require(written: Sequence[Reply]) -> None:
        for reply in written:
            if isinstance(reply, ResponseError):
                raise RedisLost(f"bookings: {reply}")

    def _peers(self, listed: Reply) -> list[str]:
        if not isinstance(listed, list):
            return []
        names = (name.decode("utf-8", "replace") for name in listed)
        return sorted(name for name in names if name != self._id)[:PEERS_LIMIT]

    def _asking(self, peers: Sequence[str]) -> list[Command]:
        keys = [self._keys.bookings(peer) for peer in peers]
        return [("MGET", *keys), *(("PTTL", key) for key in keys)]

    async def _take(self, peers: Sequence[str], read: Sequence[Reply]) -> None:
        """What was read of the others."""
        values, *left = read
        self._require(read)
        if not isinstance(values, list):
            return
        now = self._clock()
        silent: list[str] = []
        for peer, value, left_ms in zip(peers, values, left, strict=True):
            if value is None:
                silent.append(peer)
                self._forget(peer, now)
                continue
            try:
                booked = decode_bookings(value)
            except (msgspec.DecodeError, RecursionError):
                self._stats.decode_errors += 1
                continue
            self._heard[peer] = now
            if booked:
                self._busy.add(peer)
            else:
                self._busy.discard(peer)
            self._router.apply_peer_bookings(peer, booked, now - _age_s(left_ms))
        if silent:
            # One that only was slow adds itself again with its next value.
            await self._link.call([("SREM", self._keys.gateways(), *silent)])

    def _hear(self, peers: Sequence[str], values: Reply) -> None:
        """What the others send to workers; earlier versions do not tell."""
        self._require([values])
        for peer, value in zip(peers, values if isinstance(values, list) else (), strict=False):
            if value is not None:
                try:
                    self._router.apply_peer_flows(peer, _FLOWS_DECODER.decode(value))
                except (msgspec.DecodeError, RecursionError):
                    self._stats.decode_errors += 1

    def expire(self) -> None:
        """Forget the work of those that were not heard for as long as their value lives."""
        now = self._clock()
        for peer, heard in list(self._heard.items()):
            if now - heard > BOOKING_TTL_MS / 1000:
                self._forget(peer, now)
        self._stats.peers = len(self._heard)

    def _forget(self, peer: str, now: float) -> None:
        self._busy.discard(peer)
        if self._heard.pop(peer, None) is not None:
            self._router.apply_peer_bookings(peer, {}, now)
            self._router.apply_peer_flows(peer, None)
