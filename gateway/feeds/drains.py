"""Gateways tell each other which workers operators drain, so that none of them sends there.

One value per worker, ``b"<version> d"`` (drained) or ``b"<version> u"`` (not any more): the higher
version counts, of two equal ones the drain. No clocks are compared. Whoever knows more than what
stands in Redis writes it again, so a flush, or a gateway that was cut off, undoes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from gateway.feeds.base import FedRouter
from gateway.feeds.retrying import repeat
from shared.rediskeys import LOG_TTL_MS, Command, RedisKeys, Reply
from shared.redislink import RedisLink, RedisLost
from shared.types import WorkerId

EVERY_S = 0.2
"""Pause between two looks at what the others said."""
HEARD_S = 2 * EVERY_S
"""So long after one gateway was told, the others have heard of it: a pause, what two looks take,
and as much again for Redis to be slow."""
SAY_S = 0.5
"""How long an operator waits for Redis at most."""
_MOST = 65_536
_MOST_VERSION = 2**53
_LETTERS = {b"d": True, b"u": False}


@dataclass(slots=True)
class DrainTable:
    """The last word about each worker. Pure."""

    _words: dict[WorkerId, tuple[int, bool]] = field(default_factory=dict)
    _let_go: dict[WorkerId, int] = field(default_factory=dict)
    """Up to which version a word about a worker that was removed here means nothing here."""
    _unheard: dict[WorkerId, bool] | None = field(default_factory=dict)
    """What was said here before anything was heard, whose versions say nothing; None: something
    was."""

    def drained(self) -> list[WorkerId]:
        """Who is to get no new requests."""
        words = self._words.items()
        return [name for name, (version, on) in words if on and version > self._let_go.get(name, 0)]

    def let_go(self, worker: WorkerId) -> None:
        """It was removed here: if it comes back, it is another one."""
        if worker in self._words:
            self._let_go[worker] = self._words[worker][0]

    def say(self, worker: WorkerId, *, drained: bool) -> None:
        """An operator's word; what is so already is no news."""
        if self._unheard is not None:
            self._unheard[worker] = drained
        version, before = self._words.get(worker, (0, False))
        if before != drained:
            self._words[worker] = version + 1, drained

    def back(self, worker: WorkerId) -> None:
        """It joined; if it had been removed here it is another one now, for all."""
        if self._let_go.pop(worker, 0):
            self.say(worker, drained=False)

    def hear(self, told: Mapping[bytes, bytes]) -> list[WorkerId]:
        """What stands in Redis; returns who may be asked again. What is no word is left alone."""
        freed = []
        for name, value in told.items():
            word = _word(value)
            worker = WorkerId(name.decode("utf-8", "replace"))
            known = self._words.get(worker, (0, False))
            room = worker in self._words or len(self._words) < _MOST
            if word is not None and word > known and room:
                self._words[worker] = word
                if known[1] and not word[1]:
                    freed.append(worker)
        said, self._unheard = self._unheard or {}, None
        for worker, drained in said.items():
            self.say(worker, drained=drained)
        return [worker for worker in freed if not said.get(worker, False)]

    def news(self, told: Mapping[bytes, bytes]) -> dict[WorkerId, bytes]:
        """What Redis does not know, or no longer: that one is drained no more, too, since whoever
        starts later has to begin with a higher version."""
        return {
            worker: b"%d %b" % (version, b"d" if drained else b"u")
            for worker, (version, drained) in self._words.items()
            if (version, drained) > (_word(told.get(worker.encode(), b"")) or (0, False))
            and (not drained or version > self._let_go.get(worker, 0))
        }


def _word(value: bytes) -> tuple[int, bool] | None:
    version, _, letter = value.partition(b" ")
    if not version.isdigit() or letter not in _LETTERS or len(version) > 16:
        return None
    return min(int(version), _MOST_VERSION), _LETTERS[letter]


class SharedDrains:
    """Owned by the feeds, where there is a Redis."""

    def __init__(
        self,
        link: RedisLink,
        keys: RedisKeys,
        router: FedRouter,
        *,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._link, self._key, self._router = link, keys.drains(), router
        self._clock, self._rng = clock, rng
        self._table = DrainTable()
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Exchange for ever; what operators said holds during an outage, too."""

        async def turn() -> None:
            await self.exchange()
            await asyncio.sleep(EVERY_S)

        await repeat(self._link, turn, lambda _: self.apply(), self._rng)

    async def exchange(self) -> None:
        """Hear what the others said, tell what they do not know. One at a time."""
        async with self._turn:
            told = await self._read()
            for worker in self._table.hear(told):
                self._router.undrain(worker, self._clock())
            self.apply()
            commands: list[Command] = []
            if news := self._table.news(told):
                words = (part for pair in news.items() for part in pair)
                commands.append(("HSET", self._key, *words))
            if told or news:
                commands.append(("PEXPIRE", self._key, LOG_TTL_MS))
            for reply in await self._link.call(commands) if commands else ():
                if isinstance(reply, Exception):
                    raise RedisLost(f"drains: {reply}")

    async def _read(self) -> dict[bytes, bytes]:
        [reply] = await self._link.call([("HGETALL", self._key)])
        if isinstance(reply, Exception):
            raise RedisLost(f"drains: {reply}")
        flat: list[Reply] = reply if isinstance(reply, list) else []
        return dict(zip(flat[::2], flat[1::2], strict=False))

    def apply(self) -> None:
        """Workers may have joined since they were drained."""
        for worker in self._table.drained():
            self._router.drain(worker, self._clock())

    def let_go(self, worker: WorkerId) -> None:
        """See :meth:`DrainTable.let_go`."""
        self._table.let_go(worker)

    def met(self, worker: WorkerId) -> None:
        """It joined, or joined again."""
        self._table.back(worker)
        self.apply()

    def departed(self, worker: WorkerId) -> None:
        """It took its registration back, or lost it: whoever comes under its name is another."""
        self._table.say(worker, drained=False)

    async def say(self, worker: WorkerId, *, drained: bool) -> None:
        """An operator's word; returns once the other gateways have heard of it, if Redis is well.

        What they said is heard first: a gateway that has just started knows of nothing yet.
        """
        heard = await self._exchanged()
        self._table.say(worker, drained=drained)
        self._settle(worker)
        if heard and await self._exchanged():
            await asyncio.sleep(HEARD_S)

    def _settle(self, worker: WorkerId) -> None:
        change = self._router.drain if worker in self._table.drained() else self._router.undrain
        change(worker, self._clock())

    async def _exchanged(self) -> bool:
        """False: Redis is away."""
        try:
            async with asyncio.timeout(SAY_S):
                await self.exchange()
        except (RedisLost, TimeoutError):
            return False
        return True
