"""How the tasks that talk to Redis go on after an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from shared.redislink import RedisLink, RedisLost

PAUSES_S = (0.1, 2.0)


class Backoff:
    """Growing, jittered pauses between tries."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._next = PAUSES_S[0]

    def reset(self) -> None:
        """It worked."""
        self._next = PAUSES_S[0]

    async def pause(self) -> None:
        """Wait a bit longer than last time."""
        pause, self._next = self._next, min(self._next * 2, PAUSES_S[1])
        await asyncio.sleep(pause * (0.5 + self._rng.random() / 2))


async def repeat(
    link: RedisLink,
    turn: Callable[[], Awaitable[None]],
    lost: Callable[[RedisLost], None],
    rng: Random,
) -> None:
    """Take turns for ever; the link is dropped however that ends.

    :param turn: includes the wait for the next one.
    :param lost: hears why a turn failed, before the pause.
    """
    backoff = Backoff(rng)
    try:
        while True:
            try:
                await turn()
                backoff.reset()
            except RedisLost as error:
                lost(error)
                await backoff.pause()
    finally:
        await link.drop()
