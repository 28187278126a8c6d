"""An admin listener over a fleet without processes: a router, its workers' loads, and requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry
from routerkit import Rig, ok

from gateway.admin import Admin, Fleet
from gateway.asked import Asking
from gateway.config import GatewayConfig, ListenConfig
from gateway.dashboard.live import Live
from gateway.dashboard.pages import Dashboard
from gateway.dashboard.recent import Recent
from gateway.httpserver import HttpServer, bound_port
from gateway.tally import WorkerTally
from shared.load import WorkerLoad
from shared.types import WorkerId


class Feeds:
    """No lists, no strangers, nothing to ask again."""

    def outsiders(self) -> list[Any]:
        return []

    def resync(self, worker: WorkerId) -> None:
        pass

    def named_by(self, worker: WorkerId) -> list[str]:
        return []

    def lists(self) -> list[Any]:
        return []


class Scene:
    """A fleet that has served ``requests`` in the last quarter of an hour."""

    def __init__(self, workers: int = 4, requests: int = 600, seed: int = 1) -> None:
        self.rig = Rig(workers, seed=seed)
        self.now = 0.0
        self.live = Live(lambda: self.now)
        self.recent = Recent()
        self.tally = WorkerTally()
        self.rng = Random(seed)
        self.families = [self.rig.prompt(60) for _ in range(9)]
        for name in self.rig.names:
            self.load(name)
        for number in range(requests):
            self.now = 900.0 * number / requests
            self.request()

    def load(self, name: str) -> None:
        """A load report."""
        held, cached = self.rng.randrange(100, 900), self.rng.randrange(100, 1000)
        load = WorkerLoad(
            running=self.rng.randrange(9), waiting=self.rng.randrange(4), blocks_total=2000,
            blocks_used=held, blocks_cached=cached,
        )  # fmt: skip
        self.rig.router.apply_load(WorkerId(name), load, self.rig.now)

    def request(self) -> str:
        """One request through the router; its id."""
        rng, rig = self.rng, self.rig
        keys = [
            *rng.choice(self.families)[: rng.choice((20, 40, 60))],
            *rig.prompt(rng.randrange(9)),
        ]
        rig.now += 0.05
        lease = rig.begin(keys)
        matched = lease.route.matched_tokens
        usage = None if rng.random() < 0.02 else max(0, matched - 16 * (rng.random() < 0.04))
        rig.now += 0.02 + 1e-4 * (16 * len(keys) - (usage or 0)) * rng.uniform(0.7, 1.4)
        lease.first_token(rig.now)
        rig.now += 0.2
        end = ok(16 * len(keys) + 1, usage, itl_s=0.01)
        record = lease.finish(end, rig.now)
        record = msgspec.structs.replace(record, at=time.time() - 900 + self.now)
        for sink in (self.live, self.tally):
            sink.record(record)
        self.recent.keep(lease.route, record)
        if record.flow.cold and rng.random() < 0.9:
            rig.warm(lease.worker, keys)
        return record.request_id

    @asynccontextmanager
    async def serve(self, token: str = "") -> AsyncIterator[str]:
        """Base URL of an admin listener."""
        config = GatewayConfig(listen=ListenConfig(admin_token=token))
        dashboard = Dashboard(self.rig.router, self.tally, self.live, self.recent)
        admin = Admin(
            config, self.rig.router, cast(Asking, None), cast(Fleet, Feeds()),
            CollectorRegistry(), None, dashboard,
        )  # fmt: skip
        server = HttpServer(admin.handle)
        listener = await server.listen("127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{bound_port(listener)}"
        finally:
            listener.close()
            await server.shutdown(0.1)
            await asyncio.sleep(0)
