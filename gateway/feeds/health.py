"""Asking a worker who it is, whether it is ready and how busy it is.

Any answer of a peer is a value here, never an exception: a probe tells *what* is wrong. One probe
costs one or two small requests; all of them share the worker's own time limit, so that a hung
worker delays nobody else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from gateway.config import WorkersConfig
from gateway.discovery.base import address_of
from shared.load import AdapterInfo, Names, WorkerInfo, WorkerLoad
from shared.types import Epoch, WorkerId

BODY_LIMIT = 4 << 20
"""Bytes read of a probe's answer."""
REASON_LIMIT = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back from one GET."""

    status: int = 0
    """0: nothing came back."""
    body: bytes = b""
    reason: str = ""
    """Why nothing came back."""
    refused: bool = False
    """Nobody listens there, or the connection was cut."""

    @property
    def ok(self) -> bool:
        """A 2xx."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Probe:
    """One worker at one moment."""

    healthy: bool
    reason: str = ""
    """Why not; empty if healthy."""
    refused: bool = False
    """Nobody listens there, or the connection was cut: the process is gone."""
    alive: bool = False
    """It answered something, if only that it is not ready."""
    load: WorkerLoad | None = None
    names: Names | None = None
    """Of a foreign server: models and adapters that it answers to now."""


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: Any = None
    """Of an adapter: the name of its model."""

    @property
    def adapter(self) -> bool:
        """Whether it is one."""
        return isinstance(self.parent, str) and bool(self.parent)


class _ModelList(msgspec.Struct):
    data: list[_Card]

    @property
    def names(self) -> Names:
        """Models, and their adapters apart; if nothing but adapters is listed, they are models."""
        models = tuple(card.id for card in self.data if not card.adapter)
        if not models:
            return tuple(card.id for card in self.data), ()
        return models, tuple(AdapterInfo(card.id) for card in self.data if card.adapter)


class _NotReady(msgspec.Struct):
    reasons: list[str] = []


class Prober:
    """Uses the feeds' HTTP session; knows no worker by itself."""

    def __init__(self, session: aiohttp.ClientSession, config: WorkersConfig) -> None:
        self._session = session
        self._headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._timeout = aiohttp.ClientTimeout(
            total=config.health_timeout_s, connect=config.connect_timeout_s
        )

    async def get(self, url: str) -> Answer:
        """One GET without redirects, within the health time limit."""
        try:
            async with self._session.get(
                url, headers=self._headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                body = await response.content.read(BODY_LIMIT)
                while not response.content.at_eof() and len(body) < BODY_LIMIT:
                    body += await response.content.read(BODY_LIMIT)
                return Answer(response.status, body)
        except TimeoutError:
            return Answer(reason="no answer in time")
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            return Answer(reason=_short(f"cannot connect: {error.os_error}"), refused=refused)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            return Answer(reason="connection closed", refused=True)
        except aiohttp.ClientError as error:
            return Answer(reason=_short(f"{type(error).__name__}: {error}"))

    async def identify(self, url: str) -> WorkerInfo | Probe:
        """Who answers at a base URL; a failed :class:`Probe` if nobody can be made out.

        What is no worker of ours but lists models is a foreign OpenAI server. Its epoch is 0: the
        caller makes one.
        """
        answer = await self.get(f"{url}/headwater/info")
        if answer.ok:
            try:
                info = msgspec.json.decode(answer.body, type=WorkerInfo)
                fault = info.fault()
                return Probe(False, f"/headwater/info: {fault}") if fault else info
            except msgspec.DecodeError as error:
                if b'"epoch"' in answer.body:
                    return Probe(False, _short(f"/headwater/info cannot be read: {error}"))
        elif answer.status == 0 or answer.status >= 500:
            return _failed("/headwater/info", answer)
        return await self._identify_foreign(url)

    async def _identify_foreign(self, url: str) -> WorkerInfo | Probe:
        answer = await self.get(f"{url}/v1/models")
        listed = _models(answer)
        if isinstance(listed, Probe):
            return listed
        models, adapters = listed.names
        return WorkerInfo(
            id=WorkerId(address_of(url)),
            epoch=Epoch(0),
            url=url,
            models=models,
            adapters=adapters,
            engine="openai",
            max_model_len=max((card.max_model_len or 0 for card in listed.data), default=0),
            event_feed=False,
        )

    async def probe(self, info: WorkerInfo, *, with_load: bool) -> Probe:
        """Whether a known worker can take requests; for ours also its load, if asked."""
        if info.engine != "headwater":
            return await self._probe_foreign(info)
        if not with_load:
            return _readiness(await self.get(f"{info.url}/ready"), None)
        ready, load = await asyncio.gather(
            self.get(f"{info.url}/ready"), self.get(f"{info.url}/headwater/load")
        )
        return _readiness(ready, _load(load))

    async def _probe_foreign(self, info: WorkerInfo) -> Probe:
        health, models = await asyncio.gather(
            self.get(f"{info.url}/health"), self.get(f"{info.url}/v1/models")
        )
        listed = _models(models)
        if isinstance(listed, Probe):
            return listed
        # Not every server has /health; one that has it and is ill must not look well because its
        # model list answers.
        if health.status == 0 or health.status >= 500:
            return _failed("/health", health)
        return Probe(True, alive=True, names=listed.names)


def _readiness(ready: Answer, load: WorkerLoad | None) -> Probe:
    if ready.ok:
        return Probe(True, alive=True, load=load)
    if ready.status != 503:
        return replace(_failed("/ready", ready), load=load)
    try:
        reasons = msgspec.json.decode(ready.body, type=_NotReady).reasons
    except msgspec.DecodeError:
        reasons = []
    return Probe(False, _short("; ".join(reasons) or "not ready"), alive=True, load=load)


def _load(answer: Answer) -> WorkerLoad | None:
    if not answer.ok:
        return None
    try:
        return msgspec.json.decode(answer.body, type=WorkerLoad)
    except msgspec.DecodeError:
        return None


def _models(answer: Answer) -> _ModelList | Probe:
    if not answer.ok:
        return _failed("/v1/models", answer)
    try:
        return msgspec.json.decode(answer.body, type=_ModelList)
    except msgspec.DecodeError as error:
        return Probe(False, _short(f"/v1/models cannot be read: {error}"))


def _failed(path: str, answer: Answer) -> Probe:
    reason = answer.reason or f"{path} answered {answer.status}"
    return Probe(False, reason, answer.refused, alive=answer.status != 0)


def _short(text: Any) -> str:
    return str(text)[:REASON_LIMIT]
