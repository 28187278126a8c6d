"""A gateway in this process, and stub workers behind it."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
from rig import RawClient, Stub, eventually

from gateway.build import Gateway
from gateway.config import GatewayConfig
from shared.logs import configure
from shared.settings import LogConfig, load

FAST = {
    "listen.port": 0,
    "listen.admin_port": 0,
    "workers.health_interval_s": 0.1,
    # A busy machine is no reason to give a worker up.
    "workers.health_timeout_s": 10.0,
    "workers.connect_timeout_s": 10.0,
}

StubFactory = Callable[..., Awaitable[Stub]]


@dataclass
class Served:
    """A running gateway and its stubs."""

    gateway: Gateway
    stubs: list[Stub]

    @property
    def url(self) -> str:
        """Public base URL."""
        return self.gateway.url

    @property
    def admin(self) -> str:
        """Admin base URL."""
        return self.gateway.admin_url

    def inflight(self) -> int:
        """Booked attempts on all workers."""
        now = asyncio.get_running_loop().time()
        return sum(worker.inflight for worker in self.gateway.router.workers(now))


@pytest.fixture
async def stub() -> AsyncIterator[StubFactory]:
    """``await stub(models=("m",))`` starts one more stub worker."""
    stubs: list[Stub] = []

    async def start(models: Sequence[str] = ("m",)) -> Stub:
        made = await Stub.start(models)
        stubs.append(made)
        return made

    yield start
    for made in stubs:
        await made.stop()


GatewayFactory = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve() -> AsyncIterator[GatewayFactory]:
    """``await serve(stub, ..., **{"section.key": value})``: a gateway that knows these workers."""
    running: list[Gateway] = []

    async def start(*stubs: Stub, wait: bool = True, **settings: Any) -> Served:
        flags = {**FAST, "workers.urls": ",".join(s.url for s in stubs), **settings}
        gateway = Gateway(load(GatewayConfig, file=None, env={}, flags=flags))
        running.append(gateway)
        await gateway.start()
        if wait and stubs:
            ready = {s.id for s in stubs}
            await eventually(
                lambda: {str(w.id) for w in gateway.router.workers(0.0) if not w.reason} >= ready
            )
        return Served(gateway, list(stubs))

    yield start
    for gateway in running:
        await gateway.close()


@pytest.fixture
async def dial() -> AsyncIterator[Callable[[str], Awaitable[RawClient]]]:
    """``await dial(url)``: a connection that is closed after the test."""
    clients: list[RawClient] = []

    async def connect(url: str) -> RawClient:
        client = await RawClient.connect(url)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.abort()
    await asyncio.sleep(0)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All log lines from debug on, as JSON."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    lines = io.StringIO()
    configure(LogConfig(level="debug", format="json"), lines)
    yield lines
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()
