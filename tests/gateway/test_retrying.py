"""Going on after outages of Redis."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from gateway.feeds import retrying
from shared.redislink import RedisLost


class Link:
    dropped = 0

    async def drop(self) -> None:
        self.dropped += 1


async def test_turns_go_on_after_growing_pauses_and_the_link_is_dropped_once(monkeypatch) -> None:
    link, slept, heard = Link(), [], []
    turns = iter("LLLLLLL+L")

    async def turn() -> None:
        # A StopIteration would not leave a coroutine: cancelled is how a task ends.
        match next(turns, None):
            case None:
                raise asyncio.CancelledError
            case "L":
                raise RedisLost(str(len(slept)))

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(retrying.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await retrying.repeat(link, turn, lambda error: heard.append(str(error)), Random(1))
    assert heard == [str(number) for number in range(8)]
    longest = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 0.1]
    assert all(most / 2 <= took <= most for took, most in zip(slept, longest, strict=True))
    assert link.dropped == 1
