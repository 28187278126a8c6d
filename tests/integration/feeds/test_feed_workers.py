"""The background side, the real router and real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
from random import Random

import aiohttp
import pytest
from redisload import await_in_step

from gateway.config import RoutingConfig
from gateway.feeds import Feeds
from gateway.index.table import PrefixTable
from gateway.router import Router
from gateway.routing.base import Trust
from gateway.routing.catalogue import make_policies

pytestmark = pytest.mark.redis
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


class Gateway:
    """A router with its feeds, nothing else."""

    def __init__(self, config) -> None:
        self.index = PrefixTable(1_000_000, Random(1))
        routing = RoutingConfig()
        self.router = Router(self.index, make_policies(routing), routing, Random(2))
        self.feeds = Feeds(self.router, config, gateway_id="g")

    async def __aenter__(self):
        await self.feeds.start()
        return self

    async def __aexit__(self, *exc) -> None:
        await self.feeds.stop()

    def status(self, worker):
        found = [status for status in self.router.workers(0.0) if status.id == worker]
        return found[0] if found else None

    def exact(self, worker) -> bool:
        status = self.status(worker)
        return status is not None and status.trust is Trust.EXACT and not status.reason


async def complete(url: str, prompt: str) -> None:
    async with aiohttp.ClientSession() as session:
        body = {"model": "fake", "prompt": prompt, "max_tokens": 2}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()


async def test_index_follows_real_workers_through_kill_and_restart(
    kit, worker_process, redis_server_factory
) -> None:
    server = redis_server_factory("newest")
    env = {"HEADWATER_REDIS__URL": server.url, "HEADWATER_DEPLOYMENT__NAME": "t"}
    first = await asyncio.to_thread(worker_process, env=env)
    name = first.url.removeprefix("http://")
    async with Gateway(kit.settings(server.url)) as gateway:
        await kit.until(lambda: gateway.exact(name))
        await complete(first.url, PROMPT)
        await await_in_step(gateway.index, first)
        assert gateway.index.blocks(name) >= 10
        known = gateway.index.blocks(name)
        async with Gateway(kit.settings(server.url)) as late:
            await kit.until(lambda: late.exact(name))
            await kit.until(lambda: late.index.blocks(name) == known)
        os.kill(first.pid, signal.SIGKILL)
        await asyncio.to_thread(first.wait)
        await kit.until(lambda: gateway.status(name).reason, 2)
        again = await asyncio.to_thread(
            worker_process, "--port", name.rpartition(":")[2], env=env, wait=False
        )
        await asyncio.to_thread(again.await_ready)
        await kit.until(lambda: gateway.exact(name), 20)
        assert gateway.index.blocks(name) == 0
        await complete(first.url, PROMPT)
        await kit.until(lambda: gateway.index.blocks(name) == known)
        server.stop()
        await kit.until(lambda: not gateway.feeds.stats.redis_up)
        await complete(first.url, "Another text altogether, long enough for a few blocks. " * 4)
        await kit.until(lambda: gateway.index.blocks(name) > known, 5)
        server.start()
        await kit.until(lambda: gateway.feeds.stats.redis_up, 10)
        await kit.until(lambda: gateway.feeds.stats.http_feeds == 0, 10)
        assert gateway.exact(name)
        again.terminate()
        await kit.until(lambda: gateway.status(name) is None, 10)
        assert gateway.feeds.stats.task_failures == 0
