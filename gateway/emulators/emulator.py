"""One emulated engine: requests in, tokens, metrics and events out.

Prefills run one after the other, as fast as ``prefill_us`` says; answers are decoded side by side.
What is answered depends on the prompt alone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import xxhash
import zmq.asyncio
from aiohttp import web

from gateway.emulators import eventforms
from gateway.emulators.cache import Cache, CacheNews, Held, PagedCache, SlotCache
from gateway.emulators.publisher import KEPT, Publisher
from shared.blocks import pack_tokens
from shared.bundle import TokenizerBundle
from shared.bytetok import byte_bundle
from shared.openai import GenerateRequest
from shared.render import Renderer

ENGINES = ("vllm", "sglang", "llamacpp", "tgi")
_WORDS = (
    *("river", "stone", "amber", "signal", "ladder", "orchard", "copper", "window"),
    *("meadow", "harbor", "lantern", "saddle", "thunder", "velvet", "walnut", "zephyr"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is emulated, and how fast it is."""

    engine: str = "vllm"
    model: str = "emulated"
    block_size: int = 16
    blocks: int = 4096
    """llama.cpp: ``slots`` of ``context`` tokens instead."""
    slots: int = 4
    context: int = 8192
    prefill_us: float = 50.0
    """Microseconds per prompt token."""
    decode_ms: float = 1.0
    """Milliseconds per output token."""
    events: bool = True
    form: str = "map"
    """Encoding of events: ``array`` (older releases) or ``map``."""
    event_port: int = 0
    replay: bool = True
    replay_port: int = 0
    kept: int = KEPT
    """Batches that the replay keeps."""
    report: bool = True
    """``cached_tokens`` is reported."""
    version: str = ""
    """As it says; empty: a release that fits ``form``."""

    @property
    def publishes(self) -> bool:
        """It has an event stream."""
        return self.events and self.engine in ("vllm", "sglang")

    @property
    def release(self) -> str:
        """Version that it claims."""
        versions = {
            ("vllm", "array"): "0.23.0",
            ("vllm", "map"): "0.33.0",
            ("sglang", "array"): "0.5.16",
            ("sglang", "map"): "0.5.23",
        }
        return self.version or versions.get((self.engine, self.form), "emulated")


@dataclass(slots=True)
class Counters:
    """What its metrics tell."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    waiting: int = 0
    running: int = 0


@dataclass(slots=True, eq=False)
class Running:
    """A request after its prefill."""

    held: Held
    answer: list[int]
    text: str = ""
    pieces: list[str] = field(default_factory=list)
    """Text of each token."""


RESTART_S = 10.0
"""How much later than before it says that it was started, at the least."""


class Emulator:
    """An engine on loopback. ``start`` it, use ``url``, ``stop`` it."""

    def __init__(self, settings: Settings, bundle: TokenizerBundle | None = None) -> None:
        if settings.engine not in ENGINES:
            raise ValueError(f"no engine is called {settings.engine}")
        self.settings = settings
        self.renderer = Renderer(bundle or byte_bundle())
        self.counters = Counters()
        self.cache: Cache = self._make_cache()
        self.publisher: Publisher | None = None
        self.started = time.time()
        self.port = 0
        self._host = "127.0.0.1"
        self._context = zmq.asyncio.Context()
        self._turn = asyncio.Lock()
        self._freed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        """Name under which a gateway knows it."""
        return f"127.0.0.1:{self.port}"

    # ---------------------------------------------------------------- life

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        """Listen.

        :raises OSError: a port is taken.
        """
        from gateway.emulators.routes import application

        self._host = host
        await self._publish_anew()
        self._runner = web.AppRunner(application(self), shutdown_timeout=0.2, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port or self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close everything."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self.publisher is not None:
            await self.publisher.close()
            self.publisher = None
        self._context.destroy(linger=0)

    async def restart(self, **changes: object) -> None:
        """Another process at the same addresses: empty, its numbers begin anew. ``changes``: of the
        settings, e.g. ``block_size=32``. Its HTTP side does not go away."""
        ports = (0, 0)
        if self.publisher is not None:
            ports = (self.publisher.port, self.publisher.replay_port)
            await self.publisher.close()
            self.publisher = None
        self.settings = replace(self.settings, **changes)  # type: ignore[arg-type]  # from a test
        self.cache, self.counters = self._make_cache(), Counters()
        # A real engine takes longer to come back than clocks may be apart, and says so.
        self.started = max(time.time(), self.started + RESTART_S)
        await self._publish_anew(*ports)

    def lose(self, batches: int, *, keep: bool = True) -> None:
        """The next batches do not arrive; ``keep``: the replay has them."""
        assert self.publisher is not None
        self.publisher.lose, self.publisher.keep_lost = batches, keep

    async def _publish_anew(self, port: int = 0, replay_port: int = 0) -> None:
        settings = self.settings
        if not settings.publishes:
            return
        self.publisher = Publisher(self._context, settings.kept)
        await self.publisher.bind(
            self._host,
            port or settings.event_port,
            (replay_port or settings.replay_port) if settings.replay else None,
        )
        if settings.engine == "sglang":
            self.cache.clear()
            await self.tell()

    def _make_cache(self) -> Cache:
        settings = self.settings
        if settings.engine == "llamacpp":
            return SlotCache(settings.slots, settings.context)
        return PagedCache(settings.blocks, settings.block_size, secrets.token_bytes(8))

    async def tell(self, recalled: list[CacheNews] | None = None) -> None:
        """Publish what happened to the cache since the last time, or what a request reuses."""
        news = self.cache.news() if recalled is None else recalled
        if news and self.publisher is not None:
            settings = self.settings
            batch = eventforms.encode(
                settings.engine, settings.form, news, settings.block_size, time.time()
            )
            await self.publisher.publish(batch)

    # ---------------------------------------------------------------- requests

    async def prefill(self, request: GenerateRequest) -> Running:
        """Compute a prompt; returns when its first token would be there."""
        prompt = self.renderer.encode_request(request).tokens
        room = request.max_tokens or 64
        salt = request.cache_salt or "" if self.settings.publishes else ""
        counters = self.counters
        counters.waiting += 1
        try:
            async with self._turn:
                held = await self._admit(prompt, room, salt)
                if self._recalls(request) and isinstance(self.cache, PagedCache):
                    await self.tell(self.cache.recall(held))
                missing = len(prompt) - held.cached
                await asyncio.sleep(missing * self.settings.prefill_us * 1e-6)
                self.cache.computed(held, prompt)
                await self.tell()
        finally:
            counters.waiting -= 1
        counters.running += 1
        counters.requests += 1
        counters.prompt_tokens += len(prompt)
        counters.cached_tokens += held.cached
        return self._compose(held, room)

    def _recalls(self, request: GenerateRequest) -> bool:
        """The request asks for news of the blocks it reuses; only newer releases of vLLM do it."""
        asked = request.fields.get("vllm_xargs")
        wants = isinstance(asked, dict) and asked.get("kv_cache_report_mode") == "full"
        return wants and self.settings.engine == "vllm" and self.settings.form == "map"

    async def _admit(self, prompt: list[int], room: int, salt: str) -> Held:
        while (held := self.cache.begin(prompt, room, salt)) is None:
            async with self._freed:
                await self._freed.wait()
        return held

    def _compose(self, held: Held, room: int) -> Running:
        seed = xxhash.xxh3_64_intdigest(pack_tokens(held.prompt))
        words = [_WORDS[(seed >> 4 * i) % len(_WORDS)] for i in range(16)]
        text = " ".join(words[i % 16] for i in range(1 + room))
        answer = self.renderer.encode_text(text, add_special_tokens=False)[:room]
        pieces = [self.renderer.decode([token]) for token in answer]
        return Running(held, answer, self.renderer.decode(answer), pieces)

    async def decode(self, running: Running) -> AsyncIterator[str]:
        """Text of one token after the other. Blocks are told before the last of it is out."""
        held = running.held
        for number, piece in enumerate(running.pieces, 1):
            await asyncio.sleep(self.settings.decode_ms * 1e-3)
            self.counters.output_tokens += 1
            if number == len(running.pieces):
                self.cache.computed(held, held.prompt + running.answer[:-1])
                await self.tell()
            yield piece

    async def finish(self, running: Running) -> None:
        """The request has ended, well or not."""
        self.cache.end(running.held)
        self.counters.running -= 1
        await self.tell()
        async with self._freed:
            self._freed.notify_all()
