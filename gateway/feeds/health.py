"""Asking a worker who it is, whether it is ready and how busy it is.

Any answer of a peer is a value here, never an exception: a probe tells *what* is wrong. One probe
costs one or two small requests; all of them share the worker's own time limit, so that a hung
worker delays nobody else.
"""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec

from gateway.config import WorkersConfig
from gateway.feeds.answers import Answer, Probe, failed, load_of, readiness, short
from gateway.feeds.enginebook import EngineBook
from gateway.feeds.fingerprints import Fingerprints
from gateway.feeds.foreign import ForeignProber
from shared.load import WorkerInfo

BODY_LIMIT = 4 << 20
"""Bytes read of a probe's answer."""
AT_ONCE = 256
"""Requests under way at the same time, over the whole fleet."""


_CLOSED = "connection closed"
_KEPT_TRIES = 3


class Prober:
    """Uses the feeds' HTTP session; knows no worker by itself."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        config: WorkersConfig,
        book: EngineBook,
        fingerprints: Fingerprints,
    ) -> None:
        self._session = session
        self._foreign = ForeignProber(self.get, book, fingerprints)
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._timeout = aiohttp.ClientTimeout(
            total=config.health_timeout_s, connect=config.connect_timeout_s
        )

    async def get(self, url: str) -> Answer:
        """One GET without redirects, within the health time limit."""
        async with self._turn:
            return await self._get(url)

    async def _get(self, url: str) -> Answer:
        """A kept connection may have been closed just now, which says nothing of the worker: a GET
        is asked again then, on a fresh connection in the end."""
        for _ in range(_KEPT_TRIES):
            answer = await self._get_once(url)
            if answer.reason != _CLOSED:
                break
        return answer

    async def _get_once(self, url: str) -> Answer:
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
            return Answer(reason=short(f"cannot connect: {error.os_error}"), refused=refused)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            return Answer(reason=_CLOSED, refused=True)
        except aiohttp.ClientError as error:
            return Answer(reason=short(f"{type(error).__name__}: {error}"))

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
            except (msgspec.DecodeError, RecursionError) as error:
                if b'"epoch"' in answer.body:
                    return Probe(False, short(f"/headwater/info cannot be read: {error}"))
        elif answer.status == 0 or answer.status >= 500:
            return failed("/headwater/info", answer)
        return await self._foreign.identify(url)

    async def probe(self, info: WorkerInfo, *, with_load: bool) -> Probe:
        """Whether a known worker can take requests; for ours also its load, if asked."""
        if info.engine != "headwater":
            return await self._foreign.probe(info)
        if not with_load:
            return readiness(await self.get(f"{info.url}/ready"), None)
        ready, load = await asyncio.gather(
            self.get(f"{info.url}/ready"), self.get(f"{info.url}/headwater/load")
        )
        return readiness(ready, load_of(load))
