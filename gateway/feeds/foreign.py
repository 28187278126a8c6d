"""Asking engines of other makes who they are and how busy they are, through their adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from gateway.discovery.base import address_of
from gateway.engines import catalogue
from gateway.engines.base import Answers, Engine
from gateway.engines.openai import OpenAIServer
from gateway.feeds.answers import Answer, Probe, failed, models_of
from gateway.feeds.enginebook import EngineBook, Entry
from gateway.feeds.fingerprints import Fingerprints
from shared.load import WorkerInfo
from shared.types import Epoch, WorkerId

Get = Callable[[str], Awaitable[Answer]]


class ForeignProber:
    """Knows engines by what :class:`EngineBook` remembers of their addresses."""

    def __init__(self, get: Get, book: EngineBook, fingerprints: Fingerprints) -> None:
        self._get, self._book, self._fingerprints = get, book, fingerprints

    async def identify(self, url: str) -> WorkerInfo | Probe:
        """Who answers at a base URL that is no worker of ours; the caller makes its epoch."""
        answer = await self._get(f"{url}/v1/models")
        listed = models_of(answer)
        if isinstance(listed, Probe):
            return listed
        entry = self._book.at(url)
        engine, answers = await self._engine(entry)
        described = engine.describe(answers, entry.host)
        self._book.describe(entry, described)
        models, adapters = listed.names
        longest = max((card.max_model_len or 0 for card in listed.data), default=0)
        return WorkerInfo(
            id=WorkerId(address_of(url)),
            epoch=Epoch(0),
            url=url,
            models=models,
            adapters=adapters,
            engine=engine.name,
            block_size=entry.block_size or described.block_size or 16,
            blocks_total=described.blocks_total,
            max_model_len=longest or described.max_model_len,
            tokenizer=await self._fingerprints.of(models),
            prefix_cache=described.prefix_cache,
            event_feed=entry.plan is not None,
            version=described.version,
            # Engines that we know by name serve one model under all of its names.
            many_models=listed.many_models and engine.name == OpenAIServer.name,
        )

    async def _engine(self, entry: Entry) -> tuple[Engine, Answers]:
        """The adapter of an address, and the answers that it wants to see."""
        known = entry.engine
        configured = entry.settings.engine != catalogue.AUTO
        if known is not None and (configured or known.asks):
            answers = await self._ask(entry.url, known.asks)
            if configured or known.recognises(answers) or not answers:
                return known, answers
        answers = await self._ask(entry.url, catalogue.ASKS)
        entry.engine = catalogue.detect(answers)
        return entry.engine, answers

    async def probe(self, info: WorkerInfo) -> Probe:
        """Whether it can take requests, how busy it is, and for a server that is not known better
        also what it answers to."""
        engine = self._book.at(info.url).engine or catalogue.engine(info.engine)
        if not engine.polls:
            return await self._probe_plain(info)
        health, *polled = await asyncio.gather(
            self._get(f"{info.url}/health"), *(self._get(info.url + path) for path in engine.polls)
        )
        if not health.ok and health.status != 404:
            return failed("/health", health)
        reading = engine.read(_good(engine.polls, polled), info.block_size)
        load = None if reading is None else reading.load
        return Probe(True, alive=True, load=load, reading=reading)

    async def _probe_plain(self, info: WorkerInfo) -> Probe:
        health, models = await asyncio.gather(
            self._get(f"{info.url}/health"), self._get(f"{info.url}/v1/models")
        )
        listed = models_of(models)
        if isinstance(listed, Probe):
            return listed
        # Not every server has /health; one that has it and is ill must not look well because its
        # model list answers.
        if health.status == 0 or health.status >= 500:
            return failed("/health", health)
        return Probe(True, alive=True, names=listed.names)

    async def _ask(self, url: str, paths: tuple[str, ...]) -> Answers:
        return _good(paths, await asyncio.gather(*(self._get(url + path) for path in paths)))


def _good(paths: Iterable[str], answers: Iterable[Answer]) -> Answers:
    pairs = zip(paths, answers, strict=True)
    return {path: answer.body for path, answer in pairs if answer.ok}
