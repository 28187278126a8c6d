"""The upstream client on aiohttp's: what ``gateway/wire/client.py`` is compared with, and the one
to choose (``workers.http_client``) where a fault of that is suspected.

Foreign errors are mapped here, once.
"""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from functools import partial
from types import TracebackType

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest, ConnectionKey
from aiohttp.helpers import _EXC_SENTINEL
from aiohttp.http import HttpProcessingError
from aiohttp.tracing import Trace
from multidict import CIMultiDict
from yarl import URL

from gateway.exchange import KEPT_FROM_CLIENTS, Headers, end_to_end
from gateway.upstream import (
    IDLE_CONNECTION_S,
    MAX_STALE,
    READ_BYTES,
    Taker,
    Timeouts,
    UpstreamBroken,
    UpstreamConnectError,
    UpstreamError,
    UpstreamRefused,
    UpstreamResponse,
    UpstreamTimeout,
)

_INLINE_BODY = 1 << 20


def _mapped(error: BaseException) -> UpstreamError | None:
    """Our error for a foreign one, None if it is not the worker's."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamConnectError("the worker did not accept a connection in time")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ClientProxyConnectionError):
        return UpstreamConnectError("the worker cannot be reached")
    if isinstance(error, TimeoutError):
        return UpstreamTimeout("the worker sent nothing for too long")
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError | ValueError):
        return UpstreamRefused("the worker's address is not valid")
    if isinstance(error, aiohttp.ClientError | OSError):
        return UpstreamBroken("the worker broke off its answer")
    return None


class _Response:
    """:class:`UpstreamResponse` over an aiohttp response."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._content = response.content
        self.status = response.status
        self.headers = end_to_end(response.headers.items(), KEPT_FROM_CLIENTS)
        kind = response.headers.get("Content-Type", "")
        self.content_type = kind.split(";", 1)[0].strip().lower()

    async def read(self) -> bytes:
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            mapped = _mapped(error)
            if mapped is None:
                raise
            raise mapped from error

    def rest(self) -> bytes | None:
        return None  # its reader does not tell

    async def pass_on(self, taker: Taker) -> bytes:
        while (data := await self.read()) and taker.take(data):
            pass
        return data

    async def settle(self, grace_s: float) -> None:
        if self._content.at_eof():
            return
        try:
            async with asyncio.timeout(grace_s):
                while await self.read():
                    pass
        except (UpstreamError, TimeoutError):
            self._response.close()

    def leave(self) -> None:
        """Give the connection back if the answer was read to its end, else close it."""
        if self._content.at_eof():
            self._response.release()
        else:
            self._response.close()


class _Protocol(ResponseHandler):
    """Wakes the reader of a body whose framing breaks: aiohttp would leave it waiting for ever."""

    def set_exception(self, exc: BaseException, exc_cause: BaseException = _EXC_SENTINEL) -> None:
        super().set_exception(exc, exc_cause)
        body = self._payload
        if isinstance(exc, HttpProcessingError) and body is not None and not body.is_eof():
            body.set_exception(aiohttp.ClientPayloadError("broken framing"), exc)


def _protocol(loop: asyncio.AbstractEventLoop) -> ResponseHandler:
    return _Protocol(loop)


class _Connector(aiohttp.TCPConnector):
    """Notes whether the current task's call got a fresh connection or one from the pool."""

    fresh: ContextVar[bool]

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.client_proto.ResponseHandler:
        self.fresh.set(True)
        return await super()._create_connection(req, traces, timeout)

    async def _get(
        self, key: ConnectionKey, traces: list[Trace]
    ) -> aiohttp.connector.Connection | None:
        """A kept connection. What came on one meanwhile is nobody's answer; aiohttp would give it
        to the next request."""
        for protocol, _ in self._conns.get(key, ()):
            if protocol.should_close:
                protocol.close()
        return await super()._get(key, traces)


def _understood(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """The response, unless it has a transfer coding besides ``chunked``: nobody asked for one."""
    codings = ",".join(response.headers.getall("Transfer-Encoding", ()))
    if codings.strip().lower() in ("", "chunked"):
        return response
    response.close()
    raise UpstreamBroken("the worker's answer is no valid HTTP")


class _Call:
    """The context manager of one call."""

    def __init__(
        self, owner: AiohttpUpstream, method: str, url: str, headers: Headers, body: bytes,
        timeouts: Timeouts,
    ) -> None:  # fmt: skip
        self._owner = owner
        self._method, self._url, self._headers, self._body = method, url, headers, body
        self._timeouts = timeouts
        self._response: _Response | None = None

    async def __aenter__(self) -> _Response:
        response = await self._owner.request(
            self._method, self._url, self._headers, self._body, self._timeouts
        )
        self._response = _Response(response)
        return self._response

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._response is not None:
            self._response.leave()


class AiohttpUpstream:
    """:class:`Upstream` with aiohttp's client: no cap on connections, no total time limit."""

    def __init__(
        self, tls: ssl.SSLContext | None = None, resolver: AbstractResolver | None = None
    ) -> None:
        """Needs a running event loop.

        :param tls: for https workers; the system's trust if None.
        :param resolver: of names; aiohttp's own if None.
        """
        self._connector = _Connector(
            limit=0,
            keepalive_timeout=IDLE_CONNECTION_S,
            ssl=True if tls is None else tls,
            resolver=resolver,
        )
        self._connector.fresh = ContextVar("fresh_connection", default=False)
        self._connector._factory = partial(_protocol, asyncio.get_running_loop())
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=READ_BYTES,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    def open(
        self,
        url: str,
        path: str,
        headers: Iterable[tuple[str, str]],
        body: bytes,
        *,
        timeouts: Timeouts,
        method: str = "POST",
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """See :class:`Upstream`."""
        return _Call(self, method, url + path, list(headers), body, timeouts)

    async def close(self) -> None:
        """See :class:`Upstream`."""
        await self._session.close()

    async def request(
        self, method: str, url: str, headers: Headers, body: bytes, timeouts: Timeouts
    ) -> aiohttp.ClientResponse:
        """One HTTP exchange up to the head of the answer; repeated only on a stale connection."""
        for _ in range(MAX_STALE):
            self._connector.fresh.set(False)
            try:
                return _understood(await self._once(method, url, headers, body, timeouts))
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                mapped = _mapped(error)
                connected = isinstance(mapped, UpstreamBroken)
                if mapped is not None and (self._connector.fresh.get() or not connected):
                    raise mapped from error
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                mapped = _mapped(error)
                if mapped is None:
                    raise
                raise mapped from error
        raise UpstreamBroken("the worker closed each connection that was kept to it")

    async def _once(
        self, method: str, url: str, headers: Headers, body: bytes, timeouts: Timeouts
    ) -> aiohttp.ClientResponse:
        # aiohttp warns about large plain bytes because writing them is one long step; a file-like
        # object is written in pieces.
        data = io.BytesIO(body) if len(body) > _INLINE_BODY else body
        return await self._session.request(
            method,
            URL(url, encoded=True),
            headers=CIMultiDict(headers),
            data=data if body else None,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(
                total=None,
                connect=timeouts.connect_s,
                sock_connect=timeouts.connect_s,
                sock_read=timeouts.idle_s,
            ),
        )
