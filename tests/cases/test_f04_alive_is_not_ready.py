"""F04: alive is not ready. A worker that loads, stalls, recovers, or whose engine thread is dead.

The stall limit is a tenth of a second here; what it is by default is looked at as well.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from enginerig import ROOT, decode, greedy, prompt

from shared.paging import BlockPool
from worker import engine as engine_module
from worker.config import WorkerConfig
from worker.detokenise import Detokenizer
from worker.engine import Engine, GenerationRequest
from worker.fake_runner import FakeModel, FakeRunner
from worker.routes_meta import MetaRoutes
from worker.runner import StepPlan, StepResult
from worker.scheduler import Scheduler
from worker.service import Service

STALL_S = 0.1


class Stalling(FakeRunner):
    """Its steps return once the gate is open."""

    gate: threading.Event
    broken = False

    def run(self, plan: StepPlan) -> StepResult:
        self.gate.wait(30)
        if self.broken:
            raise ZeroDivisionError("a bug")
        return super().run(plan)


class Worker:
    """E's health pages over an engine under test."""

    def __init__(self) -> None:
        model = FakeModel(60, 16)
        self.runner = Stalling(
            model, sleep=lambda _: None, clock=time.monotonic, rng=random.Random(1)
        )
        self.runner.gate = threading.Event()
        self.runner.gate.set()
        scheduler = Scheduler(
            BlockPool(60, 16),
            max_batch_tokens=64,
            max_running=16,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            max_waiting=50,
        )
        self.engine = Engine(
            self.runner,
            scheduler,
            lambda tokens: Detokenizer(decode, tokens),
            time.monotonic,
            lambda _: None,
            stall_s=STALL_S,
        )
        self.service = Service(WorkerConfig(), ("m",), clock=time.monotonic, wall=time.time)

    def become_ready(self) -> None:
        self.engine.start()
        adapters = SimpleNamespace(changed=None, served=list)
        loaded: Any = SimpleNamespace(engine=self.engine, info=None, adapters=adapters)
        self.service.become_ready(loaded, None)  # type: ignore[arg-type]

    async def answer(self) -> None:
        tokens = prompt(random.Random(1), 30)
        async for _ in self.engine.generate(GenerationRequest("a", tokens, greedy(3), ROOT)):
            pass


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker()
    yield made
    made.runner.gate.set()
    if made.engine.alive:
        await made.engine.stop()


@pytest.fixture
async def http(worker: Worker) -> AsyncIterator[TestClient[Any, Any]]:
    app = web.Application()
    MetaRoutes(worker.service, 1 << 20).add_to(app)
    async with TestClient(TestServer(app)) as client:
        yield client


async def pages(http: TestClient[Any, Any]) -> tuple[int, int, list[str]]:
    """Status of /health, of /ready, and its reasons."""
    health, ready = await http.get("/health"), await http.get("/ready")
    return health.status, ready.status, (await ready.json())["reasons"]


async def becomes(http: TestClient[Any, Any], health: int, ready: int) -> list[str]:
    """Waits for it, for ten seconds at most; returns the reasons."""
    for _ in range(1000):
        seen = await pages(http)
        if seen[:2] == (health, ready):
            return seen[2]
        await asyncio.sleep(0.01)
    raise AssertionError(f"still {seen}")


async def test_while_the_model_is_loaded(worker, http) -> None:
    assert await pages(http) == (200, 503, ["loading model"])
    worker.become_ready()
    assert await pages(http) == (200, 200, [])


async def test_a_step_that_does_not_return_and_then_does(worker, http) -> None:
    worker.become_ready()
    worker.runner.gate.clear()
    task = asyncio.create_task(worker.answer())
    assert await becomes(http, 200, 503) == ["the engine is not making progress"]
    worker.runner.gate.set()
    await task
    assert await becomes(http, 200, 200) == []


async def test_a_dead_engine(worker, http) -> None:
    worker.become_ready()
    worker.runner.broken = True
    await asyncio.gather(worker.answer(), return_exceptions=True)
    assert await becomes(http, 503, 503)


async def test_draining(worker, http) -> None:
    worker.become_ready()
    worker.service.drain()
    assert await pages(http) == (200, 503, ["draining"])


def test_the_limit_leaves_time_for_a_probe_within_20_s() -> None:
    assert engine_module.STALL_S <= 15.0
