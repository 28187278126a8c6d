"""The upstream client of the hot path: pooled HTTP/1.1 connections, one exchange at a time on each.

What a call costs here is a head put together, one write, and what llhttp's callbacks take
(docs/adr/0017-relay.md). Semantics: :mod:`gateway.upstream`.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from gateway.exchange import KEPT_FROM_CLIENTS, end_to_end
from gateway.upstream import (
    IDLE_CONNECTION_S,
    MAX_STALE,
    Taker,
    Timeouts,
    UpstreamBroken,
    UpstreamConnectError,
    UpstreamCut,
    UpstreamError,
    UpstreamRefused,
    UpstreamResponse,
)
from gateway.wire.addresses import Addresses
from gateway.wire.connection import Connection
from gateway.wire.heads import BadHead, decoded, encoded, sealed

_PLAIN = {"http": 80, "https": 443}
_MAX_ORIGINS = 4096


class Origin(msgspec.Struct, frozen=True):
    """Where a base URL leads."""

    host: str
    port: int
    tls: bool
    host_header: str
    prefix: str
    """Path of the base URL, without a slash at its end."""
    authorization: str
    """From a name and password in the URL; empty without."""


def origin_of(url: str) -> Origin:
    """Take a base URL apart. Raises :class:`UpstreamRefused`."""
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode("ascii")
    except ValueError:
        raise UpstreamRefused("the worker's address is not valid") from None
    if parts.scheme not in _PLAIN or not host or parts.query or parts.fragment:
        raise UpstreamRefused("the worker's address is not valid")
    usual = _PLAIN[parts.scheme]
    shown = f"[{host}]" if ":" in host else host
    user = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        user = "Basic " + b64encode(pair.encode()).decode()
    return Origin(
        host=host,
        port=usual if port is None else port,
        tls=parts.scheme == "https",
        host_header=shown if port in (None, usual) else f"{shown}:{port}",
        prefix=parts.path.rstrip("/"),
        authorization=user,
    )


class _Response:
    """:class:`UpstreamResponse` over a connection whose head has come."""

    __slots__ = ("_connection", "content_type", "headers", "pass_on", "read", "rest", "status")

    def __init__(self, connection: Connection, *, verbatim: bool) -> None:
        self._connection = connection
        self.read: Callable[[], Coroutine[Any, Any, bytes]] = connection.read
        self.pass_on: Callable[[Taker], Coroutine[Any, Any, bytes]] = connection.read
        self.rest = connection.rest
        self.status = connection.status
        known = connection.known
        if known is not None and known.headers is not None:
            self.headers, self.content_type = known.headers, known.content_type
            return
        pairs = decoded(connection.headers)
        self.headers = pairs if verbatim else end_to_end(pairs, KEPT_FROM_CLIENTS)
        kind = next((value for name, value in pairs if name.lower() == "content-type"), "")
        self.content_type = kind.split(";", 1)[0].strip().lower()
        if known is not None and not verbatim:
            self.headers = sealed(self.headers)
            known.headers, known.content_type = self.headers, self.content_type

    async def settle(self, grace_s: float) -> None:
        if self._connection.complete:
            return
        try:
            async with asyncio.timeout(grace_s):
                while await self._connection.read():
                    pass
        except (UpstreamError, TimeoutError):
            self._connection.abort()


class _Call:
    """The context manager of one call."""

    __slots__ = ("_body", "_connection", "_head", "_origin", "_owner", "_timeouts")

    def __init__(
        self, owner: WireUpstream, origin: Origin, head: bytes, body: bytes, timeouts: Timeouts
    ) -> None:
        self._owner, self._origin, self._timeouts = owner, origin, timeouts
        self._head, self._body = head, body
        self._connection: Connection | None = None

    async def __aenter__(self) -> UpstreamResponse:
        for _ in range(MAX_STALE):
            connection = self._owner.kept(self._origin)
            kept = connection is not None
            if connection is None:
                connection = await self._owner.connect(self._origin, self._timeouts.connect_s)
            try:
                connection.begin(self._head, self._body, self._timeouts.idle_s)
                await connection.head()
            except UpstreamBroken:
                connection.abort()
                if not kept or connection.heard:
                    raise
            except BaseException:
                connection.abort()
                raise
            else:
                self._connection = connection
                return _Response(connection, verbatim=self._owner.verbatim)
        raise UpstreamCut("the worker closed each connection that was kept to it")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None and self._connection.end():
            self._owner.keep(self._origin, self._connection)


class WireUpstream:
    """:class:`gateway.upstream.Upstream` on httptools: no cap on connections, no total limit."""

    def __init__(
        self,
        tls: ssl.SSLContext | None = None,
        *,
        verbatim: bool = False,
        allows: Callable[[str, str], bool] = lambda host, address: True,
    ) -> None:
        """Needs a running event loop.

        :param tls: for https workers; the system's trust if None.
        :param allows: whether a connection to a host may go to one of its addresses.
        :param verbatim: answers keep all their headers: for who relays nothing.
        """
        self.verbatim = verbatim
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._addresses = Addresses(self._loop, allows)
        self._origins: dict[str, Origin] = {}
        self._idle: dict[Origin, list[Connection]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

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
        """See :class:`gateway.upstream.Upstream`."""
        try:
            origin = self._origin(url)
            head = _head(method, origin, path, headers, len(body))
        except BadHead:
            return _Refused(UpstreamRefused("the request cannot be put on the wire"))
        except UpstreamRefused as error:
            return _Refused(error)
        return _Call(self, origin, head, body, timeouts)

    async def close(self) -> None:
        """See :class:`gateway.upstream.Upstream`."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # transports tell their protocols in the next turn

    def _origin(self, url: str) -> Origin:
        origin = self._origins.get(url)
        if origin is None:
            origin = origin_of(url)
            if len(self._origins) >= _MAX_ORIGINS:
                self._origins.clear()
            self._origins[url] = origin
        return origin

    def kept(self, origin: Origin) -> Connection | None:
        """The connection that was used last, if one is still open."""
        connections = self._idle.get(origin)
        while connections:
            connection = connections.pop()
            if connection.lost:
                continue
            if self._loop.time() - connection.idle_since < IDLE_CONNECTION_S:
                return connection
            connection.abort()
        return None

    def keep(self, origin: Origin, connection: Connection) -> None:
        """Put a connection back."""
        if self._closed:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        idle = self._idle.get(origin)
        if idle is None:
            idle = self._idle[origin] = []
        idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE_CONNECTION_S / 2, self._sweep)

    def _sweep(self) -> None:
        """Close what nobody used for long, so that a burst's connections do not stay."""
        self._sweeper = None
        oldest = self._loop.time() - IDLE_CONNECTION_S
        for origin, connections in list(self._idle.items()):
            fresh = []
            for connection in connections:
                if connection.idle_since > oldest and not connection.lost:
                    fresh.append(connection)
                else:
                    connection.abort()
            if fresh:
                self._idle[origin] = fresh
            else:
                del self._idle[origin]
        if self._idle and not self._closed:
            self._sweeper = self._loop.call_later(IDLE_CONNECTION_S / 2, self._sweep)

    async def connect(self, origin: Origin, connect_s: float) -> Connection:
        """A fresh connection. Raises :class:`UpstreamConnectError`."""
        try:
            async with asyncio.timeout(connect_s):
                sock = await self._addresses.socket(origin.host, origin.port)
                try:
                    _, connection = await self._loop.create_connection(
                        lambda: Connection(self._loop, learns=not self.verbatim),
                        sock=sock,
                        ssl=self._context() if origin.tls else None,
                        server_hostname=origin.host if origin.tls else None,
                    )
                except BaseException:
                    sock.close()
                    raise
        except TimeoutError:
            raise UpstreamConnectError("the worker did not accept a connection in time") from None
        except ssl.SSLError as error:
            raise UpstreamConnectError("no secure connection to the worker") from error
        except OSError as error:
            raise UpstreamConnectError("the worker cannot be reached") from error
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class _Refused:
    """A call that cannot be made says so when it is entered, as all failures do."""

    def __init__(self, error: UpstreamRefused) -> None:
        self._error = error

    async def __aenter__(self) -> UpstreamResponse:
        raise self._error

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


def _head(
    method: str, origin: Origin, path: str, headers: Iterable[tuple[str, str]], length: int
) -> bytes:
    if origin.authorization and not any(name.lower() == "authorization" for name, _ in headers):
        headers = [*headers, ("Authorization", origin.authorization)]
    own = b"Content-Length: %d\r\n" % length if length or method != "GET" else b""
    return encoded(f"{method} {origin.prefix}{path} HTTP/1.1", headers, own, origin.host_header)
