"""Answers on the wire: ``exchange.Client`` over a connection of our own server."""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

from gateway.exchange import BODYLESS, Answer, ClientGone, Headers
from gateway.wire.chunks import content_of
from gateway.wire.heads import Sealed, encoded

if TYPE_CHECKING:
    from gateway.wire.request import ServerRequest
    from gateway.wire.served import ServerConnection

SERVER = "headwater"
_SERVER = f"Server: {SERVER}\r\n".encode()


class Dates:
    """The ``Date`` header, made once a second."""

    __slots__ = ("_line", "_second")

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        """Now, with its name and its end."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"Date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line


_STARTS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}


def _start(status: int) -> str:
    return _STARTS.get(status) or f"HTTP/1.1 {status} Unknown"


def _own(headers: Headers, extra: bytes, date: bytes) -> bytes:
    """``extra`` and what every answer says of itself."""
    # Those that are sealed come from a worker, whose name ends at the gateway.
    named = type(headers) is not Sealed and any(name.lower() == "server" for name, _ in headers)
    return extra + date if named else b"%b%b%b" % (extra, date, _SERVER)


def whole_head(
    answer: Answer, date: bytes, extra: bytes = b"", *, close: bool, old: bool = False
) -> bytes:
    """Head of a whole answer. Raises :class:`gateway.wire.heads.BadHead`.

    :param date: the line that tells it.
    :param extra: lines of our own, each with its end.
    """
    own = _own(answer.headers, extra, date)
    if answer.status not in BODYLESS:
        own = b"%bContent-Length: %d\r\n" % (own, len(answer.body))
    if close or old:
        own += b"Connection: close\r\n" if close else b"Connection: keep-alive\r\n"
    return encoded(_start(answer.status), answer.headers, own)


class WireClient:
    """:class:`gateway.exchange.Client` over one request of a connection."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_extra",
        "_head",
        "_request",
        "close",
        "started",
        "status",
    )

    def __init__(
        self, request: ServerRequest, connection: ServerConnection, extra: bytes = b""
    ) -> None:
        """``extra``: lines of our own, each with its end, for each answer's head."""
        self._request, self._connection, self._extra = request, connection, extra
        self._head = b""
        self._chunked = False
        self.started = False
        self.status = 0
        self.close = False
        """The connection ends with this answer."""

    async def send(self, answer: Answer) -> None:
        """See :class:`gateway.exchange.Client`. Does not wait for a slow reader."""
        self.started, self.status = True, answer.status
        closing = self._closes()
        head = whole_head(
            answer, self._connection.date, self._extra, close=closing, old=self._request.old
        )
        bodyless = self._request.method == "HEAD" or answer.status in BODYLESS
        self._connection.send(head if bodyless else head + answer.body)

    async def start(self, status: int, headers: Headers) -> None:
        """See :class:`gateway.exchange.Client`; the head leaves with the first bytes."""
        self.started, self.status = True, status
        self._chunked = not self._request.old
        if not self._chunked:
            self.close = True
        own = _own(headers, self._extra, self._connection.date)
        if self._chunked:
            own += b"Transfer-Encoding: chunked\r\n"
        if self._closes():
            own += b"Connection: close\r\n"
        self._head = encoded(_start(status), headers, own)

    async def write(self, data: bytes) -> None:
        """See :class:`gateway.exchange.Client`."""
        if self._connection.lost:
            raise ClientGone
        self.put(data)
        await self._connection.drain()

    @property
    def flowing(self) -> bool:
        """See :class:`gateway.exchange.Client`."""
        connection = self._connection
        return self.started and connection.drained is None and not connection.lost

    def put_chunk(self, chunk: bytes) -> None:
        """See :class:`gateway.exchange.Client`."""
        if self._head or not self._chunked:
            self.put(content_of(chunk))
        else:
            self._connection.send(chunk)

    def put(self, data: bytes) -> None:
        """See :class:`gateway.exchange.Client`."""
        if self._chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data, self._head = self._head + data, b""
        self._connection.send(data)

    async def finish(self) -> None:
        """See :class:`gateway.exchange.Client`."""
        if self._connection.lost:
            raise ClientGone
        self._connection.send(self._head + (b"0\r\n\r\n" if self._chunked else b""))
        self._head = b""

    def abort(self) -> None:
        """See :class:`gateway.exchange.Client`."""
        self._connection.abort()

    def _closes(self) -> bool:
        """Whether the connection ends with this answer; tells the server as well."""
        request = self._request
        # A client that has not sent its body after all may or may not send it later.
        if self.close or (request.expects and not request.complete):
            request.keep_alive = False
        return not request.keep_alive
