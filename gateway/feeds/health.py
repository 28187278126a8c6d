"""Asking a worker who it is, whether it is ready and how busy it is.

Any answer of a peer is a value here, never an exception: a probe tells *what* is wrong. One probe
costs one or two small requests; all of them share the worker's own time limit, so that a hung
worker delays nobody else.
"""

from __future__ import annotations

import asyncio

import msgspec

from gateway.config import WorkersConfig
from gateway.feeds.answers import Answer, Probe, failed, load_of, readiness, short
from gateway.feeds.enginebook import EngineBook
from gateway.feeds.fingerprints import Fingerprints
from gateway.feeds.foreign import ForeignProber
from gateway.upstream import (
    Timeouts,
    Upstream,
    UpstreamConnectError,
    UpstreamCut,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.wire.heads import sealed
from shared.load import WorkerInfo

BODY_LIMIT = 4 << 20
"""Bytes read of a probe's answer."""
AT_ONCE = 256
"""Requests under way at the same time, over the whole fleet."""
LATE = "no answer in time"


class Prober:
    """Calls workers as requests do, over connections of its own; knows no worker by itself."""

    def __init__(
        self,
        upstream: Upstream,
        config: WorkersConfig,
        book: EngineBook,
        fingerprints: Fingerprints,
    ) -> None:
        """``upstream``: gives answers with all their headers, for nothing is relayed."""
        self._upstream = upstream
        self._foreign = ForeignProber(self.get, book, fingerprints)
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._headers = sealed(
            [("Accept", "*/*"), ("Accept-Encoding", "identity")]
            + ([("Authorization", f"Bearer {config.api_key}")] if config.api_key else [])
        )
        self._limit_s = config.health_timeout_s
        self._timeouts = Timeouts(config.connect_timeout_s, config.health_timeout_s)

    async def get(self, url: str) -> Answer:
        """One GET without redirects, within the health time limit."""
        base, path = _taken_apart(url)
        async with self._turn:
            try:
                async with asyncio.timeout(self._limit_s):
                    return await self._get(base, path)
            except TimeoutError:
                return Answer(reason=LATE)

    async def _get(self, base: str, path: str) -> Answer:
        call = self._upstream.open(
            base, path, self._headers, b"", timeouts=self._timeouts, method="GET"
        )
        try:
            async with call as response:
                body = b""
                while len(body) < BODY_LIMIT and (piece := await response.read()):
                    body += piece
                return Answer(response.status, body)
        except UpstreamTimeout:
            return Answer(reason=LATE)
        except UpstreamConnectError as error:
            cause = error.__cause__
            if cause is None:
                return Answer(reason=LATE)
            refused = isinstance(cause, ConnectionRefusedError)
            return Answer(reason=short(f"cannot connect: {cause}"), refused=refused)
        except UpstreamCut:
            return Answer(reason="connection closed", refused=True)
        except UpstreamError as error:
            return Answer(reason=short(str(error)))

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


def _taken_apart(url: str) -> tuple[str, str]:
    """The base URL of a host and the path on it."""
    at = url.index("/", url.index("//") + 2)
    return url[:at], url[at:]
