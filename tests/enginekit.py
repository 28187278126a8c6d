"""Emulated engines behind a gateway in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from stopwatch import Limit

from gateway.build import Gateway
from gateway.config import GatewayConfig
from gateway.decision import WorkerStatus
from gateway.emulators import Emulator, Settings
from gateway.emulators.cache import PagedCache
from gateway.emulators.tokenizerfiles import write_tokenizer
from shared.bytetok import byte_bundle
from shared.settings import load

MODEL = "emulated"
FAST = {"prefill_us": 1.0, "decode_ms": 0.05}


@dataclass
class Turn:
    """One answered request."""

    predicted: int
    cached: int | None
    prompt: int
    worker: str
    text: str


@dataclass
class Lab:
    """A gateway and the engines behind it."""

    gateway: Gateway
    engines: list[Emulator]
    session: aiohttp.ClientSession

    def status(self, which: int = 0) -> WorkerStatus:
        """What the gateway says of an engine."""
        name = self.engines[which].id
        found = [w for w in self.gateway.router.workers(time.monotonic()) if w.id == name]
        assert found, f"{name} is not known"
        return found[0]

    def exact(self) -> bool:
        """All engines are known exactly."""
        workers = self.gateway.router.workers(time.monotonic())
        trusted = [w for w in workers if w.trust == "exact" and w.state == "ready"]
        return len(trusted) == len(self.engines)

    def in_step(self, which: int = 0) -> bool:
        """The index has as many keys of an engine as that has whole blocks."""
        cache = self.engines[which].cache
        assert isinstance(cache, PagedCache)
        held = len(cache.pool.snapshot_keys())
        size = self.engines[which].settings.block_size
        return self.status(which).index_blocks == held * min(size, 16) // 16

    async def say(self, system: str, *texts: str, limit: int = 8, **more: Any) -> Turn:
        """One chat turn."""
        messages = [{"role": "system", "content": system}]
        for place, text in enumerate(texts):
            messages.append({"role": "assistant" if place % 2 else "user", "content": text})
        body = {"model": MODEL, "messages": messages, "max_tokens": limit, **more}
        async with self.session.post(f"{self.gateway.url}/v1/chat/completions", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            details = answer["usage"].get("prompt_tokens_details") or {}
            return Turn(
                int(reply.headers["x-headwater-matched-tokens"]),
                details.get("cached_tokens"),
                answer["usage"]["prompt_tokens"],
                reply.headers["x-headwater-worker"],
                answer["choices"][0]["message"]["content"],
            )

    async def until(self, check: Callable[[], bool], within_s: float = 20.0) -> float:
        """Wait for what happens by itself; seconds that it took."""
        begun, limit = time.monotonic(), Limit(within_s)
        while not check():
            assert not limit.over(), (self.gateway.router.workers(begun), check)
            await asyncio.sleep(0.02)
        return time.monotonic() - begun


def static_of(emulator: Emulator) -> dict[str, Any]:
    """How an engine stands in ``[[workers.static]]``."""
    told: dict[str, Any] = {"url": emulator.url}
    publisher = emulator.publisher
    if emulator.settings.engine == "vllm":
        told["events"] = "none" if publisher is None else f"tcp://127.0.0.1:{publisher.port}"
        if publisher is not None and publisher.replay_port:
            told["replay"] = f"tcp://127.0.0.1:{publisher.replay_port}"
    return told


@asynccontextmanager
async def lab(
    folder: Path, *fleet: Settings, before: Callable[..., Any] | None = None, **settings: Any
) -> AsyncIterator[Lab]:
    """``before(engines)`` is awaited when the engines run and the gateway does not yet."""
    engines = [Emulator(one) for one in fleet]
    for engine in engines:
        await engine.start()
    if before is not None:
        await before(engines)
    tokenizer = write_tokenizer(byte_bundle(), folder / "tokenizer")
    flags = {
        "listen.port": 0,
        "listen.admin_port": 0,
        "workers.health_interval_s": 0.1,
        "workers.health_timeout_s": 5.0,
        "log.level": "error",
        "render.tokenizers": json.dumps({MODEL: str(tokenizer)}),
        "workers.static": json.dumps([static_of(engine) for engine in engines]),
        **settings,
    }
    gateway = Gateway(load(GatewayConfig, file=None, env={}, flags=flags))
    try:
        await gateway.start()
        await gateway.until_ready()
        async with aiohttp.ClientSession() as session:
            yield Lab(gateway, engines, session)
    finally:
        await gateway.close()
        for engine in engines:
            await engine.stop()


def emulated(engine: str = "vllm", **more: Any) -> Settings:
    """A fast engine."""
    return Settings(engine=engine, model=MODEL, **{**FAST, **more})
