"""C02: a Redis that keeps its connections open and says nothing costs no request anything.

Scaled: frozen for 2 s (in the deep suite 60 s) instead of 30 s.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from depth import DEPTH
from redisload import load, redis_up
from redisrig import RedisProxy, talk
from rig import chat, eventually

pytestmark = pytest.mark.redis
FROZEN_S = 2.0 * DEPTH


@pytest.mark.parametrize(
    "options",
    ["?socket_timeout=60&health_check_interval=1"] if DEPTH == 1 else ["", "?socket_timeout=60"],
)
async def test_a_freeze_under_load(serve, stub, redis_server_factory, options) -> None:
    server = redis_server_factory("newest")
    proxied = RedisProxy(server.port)
    try:
        stubs = [await stub() for _ in range(3)]
        served = await serve(*stubs, **{"redis.url": proxied.url + options})
        await eventually(lambda: redis_up(served), 10)
        async with load(served.url, lambda n: chat(f"{n} and more of it"), per_s=20) as before:
            await asyncio.sleep(1.0)
        proxied.freeze()
        async with load(served.url, lambda n: chat(f"{n} and more of it"), per_s=20) as during:
            await eventually(lambda: not redis_up(served), 5)
            open_at = len(during.seconds)
            await asyncio.sleep(FROZEN_S)
            await eventually(lambda: len(during.seconds) >= open_at + 20)
            writes, since = calls(server.port, "set"), time.monotonic()
            proxied.thaw()
            await eventually(lambda: redis_up(served), 10)
            await asyncio.sleep(0.5)
        before.check()
        during.check()
        # On an idle machine 100 ms and 5 ms more; the test's own machine is not idle. Who waits for
        # Redis waits 500 ms.
        assert during.percentile(0.5) < before.percentile(0.5) + 0.25
        assert during.percentile(0.5, open_at) < before.percentile(0.5) + 0.25
        # What had been written down meanwhile is not sent afterwards: two a second are normal.
        late = calls(server.port, "set") - writes
        assert late <= 7 + 2 * (time.monotonic() - since), late
    finally:
        proxied.close()


def calls(port: int, command: str) -> int:
    """How often a command was run."""
    found = talk(port, "INFO", "commandstats")
    return int(found.get(f"cmdstat_{command}", {}).get("calls", 0))
