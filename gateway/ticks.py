"""Who looks at something again and again does so at moments that all of them share.

A process that sleeps is woken as often as there are moments at which somebody wants to look, and
waking costs more than most looks. Periods that are multiples of each other share their moments.
"""

from __future__ import annotations

import asyncio

_EARLY = 0.25
"""A timer may fire a little before its moment: this share of a period before it counts as at it."""


async def tick(period_s: float) -> None:
    """Wait for the next multiple of ``period_s`` on the event loop's clock.

    :param period_s: seconds; at most 1.25 times as long is waited, and at least a quarter of it.
    """
    await asyncio.sleep(until_next(period_s, asyncio.get_running_loop().time()))


def until_next(period_s: float, now: float) -> float:
    """Seconds from ``now`` to the next shared moment that is not this one. Pure."""
    rest = period_s - now % period_s
    return rest if rest > _EARLY * period_s else rest + period_s
