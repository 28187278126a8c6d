"""C01: a Redis that is not there is no reason not to serve."""

from __future__ import annotations

import json

import pytest
from caserig import total
from redisload import redis_up
from redisrig import RedisProxy
from rig import CHAT, ask, chat, eventually
from stopwatch import Stopwatch

pytestmark = pytest.mark.redis


@pytest.fixture
def proxied(redis_server_factory):
    """R: a server behind a proxy."""
    server = redis_server_factory("newest")
    made = RedisProxy(server.port)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["refused", "silent", "garbage"])
async def test_redis_down_at_start(serve, stub, proxied, log, how, free_port) -> None:
    worker = await stub()
    target = proxied.target
    if how == "refused":
        proxied.refuse()
    elif how == "silent":
        proxied.freeze()
    else:
        # Somebody else listens there.
        proxied.target = worker.port
    begun = Stopwatch()
    served = await serve(worker, **{"redis.url": proxied.url})
    assert begun.seconds() < 5.0
    assert (await ask(served.url, CHAT, chat("one"))).status == 200
    assert (await ask(served.url, "/ready")).status == 200
    assert await total(served.admin, "headwater_redis_up") == 0
    await eventually(lambda: served.gateway.feeds.stats.redis_reason, 5)
    for number in range(20):
        assert (await ask(served.url, CHAT, chat(str(number)))).status == 200
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert len([line for line in lines if line["event"] == "redis_down"]) == 1
    proxied.target = target
    proxied.accept()
    proxied.thaw()
    proxied.cut()
    await eventually(lambda: redis_up(served), 10)
    assert await total(served.admin, "headwater_redis_up") == 1
    assert (await ask(served.url, CHAT, chat("two"))).status == 200
