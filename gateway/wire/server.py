"""The public listener's server: HTTP/1.1 on httptools, one task per request, in order.

    head -> task(handler) ... body -> answer -> (next request of the connection | close)

- llhttp is strict: what could be framed in two ways is refused (400) and the connection closed.
- Requests behind the one being answered wait in line, and reading pauses meanwhile. What one read
  brought beyond a few of them stays unread bytes until it is their turn.
- The next request waits until the client has taken in what was answered before.
- A client that leaves cancels its handler.
- After an answer before the end of a body the rest is read and thrown away for a while: closed at
  once, the client might never see the answer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from socket import socket
from typing import cast

import httptools

from gateway.exchange import error_answer
from gateway.wire import limits
from gateway.wire.answers import Dates, whole_head
from gateway.wire.heading import read_head
from gateway.wire.known import KnownHead, learn
from gateway.wire.request import Meaning, ServerRequest
from shared.errors import ApiError, BadRequest, HeadTooLarge

Handler = Callable[[ServerRequest, "ServerConnection"], Awaitable[None]]

_NO_HTTP = BadRequest("The request is not valid HTTP.")
_HEAD_TOO_LARGE = HeadTooLarge(
    f"The request line and headers are larger than the limit of {limits.MAX_HEAD_BYTES} bytes."
)
_END_OF_HEAD = b"\r\n\r\n"


class ServerConnection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "_between",
        "_closing",
        "_head_bytes",
        "_held",
        "_idle_since",
        "_known",
        "_line",
        "_linger",
        "_loop",
        "_parser",
        "_paused",
        "_rest",
        "_resumes",
        "_server",
        "_strange",
        "_task",
        "_timer",
        "_transport",
        "_unsent",
        "current",
        "drained",
        "lost",
    )

    def __init__(self, server: WireServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop = server, loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._line: deque[ServerRequest] = deque()
        """Requests whose head has come, the one being answered first."""
        self._task: asyncio.Task[None] | None = None
        self.drained: asyncio.Future[None] | None = None
        """A slow reader keeps what is sent from leaving; until when."""
        self._timer: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._held = b""
        """What one read brought beyond the requests that may wait in line."""
        self._unsent = 0
        self._paused = False
        self._resumes = False
        """What is parsed is the head that :meth:`_stay` puts before a body."""
        self._closing = False
        """Nothing that still comes is looked at."""
        self._known: KnownHead[Meaning] | None = None
        """The head that was parsed last, if it may come again."""
        self._strange = 0
        """Heads in a row that were others."""
        self._between = True
        """The parser waits for the beginning of a request."""
        self._rest = 0
        """So much is to come of a body whose head was known: it needs no parser."""
        self._idle_since: float | None = None
        self.current = ServerRequest(self)
        """Whose head or body is being read."""
        self.lost = False

    # --- the answer's side

    def send(self, data: bytes) -> None:
        """Write without waiting."""
        if self._transport is not None and not self.lost:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait for a slow reader; returns at once in the usual case, and if it has left.

        One that takes in nothing at all for :data:`limits.STALL_S` is cut.
        """
        while (drained := self.drained) is not None and not self.lost:
            unsent = self._left_to_send()
            await asyncio.wait((drained,), timeout=limits.STALL_S)
            if not drained.done() and self._left_to_send() >= unsent:
                self.abort()
                return

    def _left_to_send(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Cut the connection, so that nothing incomplete looks complete."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def date(self) -> str:
        """For the ``Date`` header."""
        return self._server.dates.text()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Answers the present request; None between two."""
        return self._task

    def close(self) -> None:
        """Close after what has been written; cut if the client takes in nothing of it for long."""
        self._closing = True
        if self._transport is None or self.lost:
            return
        self._transport.close()
        self._unsent = self._left_to_send()
        if self._unsent:
            self._linger = self._loop.call_later(limits.STALL_S, self._still_closing)

    def _still_closing(self) -> None:
        if self._left_to_send() < self._unsent:
            self.close()
        else:
            self.abort()

    def cancel(self) -> None:
        """End the handler and the connection."""
        if self._task is not None:
            self._task.cancel()
        self.abort()

    # --- one request after the other

    def _begin(self) -> None:
        self._idle_since = None
        self._task = self._loop.create_task(self._serve(self._line[0]))

    async def _serve(self, request: ServerRequest) -> None:
        try:
            await self._server.handler(request, self)
            if len(self._line) > 1 or self._held:
                await self.drain()  # or answers to requests in line would pile up
        except ConnectionError:
            self.abort()
        except BaseException:
            self.abort()
            raise
        finally:
            self._task = None
            self._line.popleft()
            self._next(request)

    def _next(self, request: ServerRequest) -> None:
        """The answer of ``request`` has been written."""
        if self.lost:
            return
        if self._closing:
            self.close()
            return
        if not request.complete and not request.broken:
            request.drop_body()
            self._await_rest(end=not request.keep_alive)
        else:
            self._go_on(request)
        self._unpause()

    def _await_rest(self, *, end: bool) -> None:
        """Read on for a while and throw it away. ``end``: the client learns that no more comes."""
        if end and self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        self._linger = self._loop.call_later(limits.LINGER_S, self.close)

    def _go_on(self, request: ServerRequest) -> None:
        """Request and answer are through."""
        if not request.keep_alive or self._server.closing:
            self.close()
        elif self._line:
            self._begin()
        else:
            self._await_head()

    def _await_head(self) -> None:
        # One timer serves many requests: it looks at the clock when it fires.
        self._idle_since = now = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(now + limits.HEAD_S, self._silent)

    def _silent(self) -> None:
        """No head came in time; a client that is still taking in its last answer gets more."""
        self._timer = None
        if self._idle_since is None or self._transport is None:
            return
        due = self._idle_since + limits.HEAD_S
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._silent)
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:
            self._unsent = unsent
            self._await_head()
        else:
            self.abort()

    def _unpause(self) -> None:
        if self._paused and len(self._line) <= 1 and self._transport is not None:
            held, self._held = self._held, b""
            if held:
                self._receive(held)
            if not self._held and len(self._line) <= 1 and not self.lost:
                self._paused = False
                self._transport.resume_reading()

    def _pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _refuse(self, error: ApiError) -> None:
        """What came is no HTTP, or too much of it. Never quotes what the client sent."""
        self._closing = True
        current = self.current
        if self._task is not None:
            current.broken = True
            current.wake()
            if current is not self._line[0]:
                return  # an answer to an earlier request is on its way; then the end
            self._closing = False  # its handler says what is wrong
            current.keep_alive = False
            return
        answer = error_answer(error)
        self.send(whole_head(answer, self.date, close=True) + answer.body)
        self._await_rest(end=True)

    # --- the event loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._transport.set_write_buffer_limits(high=limits.WRITE_BYTES)
        self._server.connections.add(self)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._held:  # read before the pause came into force
            self._held += data
        elif self._rest:
            self._receive(self._body_piece(data))
        elif (
            (known := self._known) is not None
            and self._between
            and not self._line
            and not self._closing
            and (at := known.end_in(data))
        ):
            self._receive(self._known_request(known, data, at))
        else:
            first = self._between and not self._line
            self._receive(data)
            if first and self._strange < limits.STRANGE_HEADS:
                self._learn(data)

    def _known_request(self, known: KnownHead[Meaning], data: bytes, at: int) -> bytes:
        """A request begins whose body is at ``at``; returns what lies behind it."""
        self._strange = 0
        self.current = request = ServerRequest(self)
        request.has_head(known.meaning)
        request.length = self._rest = known.length
        self._line.append(request)
        self._begin()
        return self._body_piece(data[at:])

    def _body_piece(self, data: bytes) -> bytes:
        """More of a body without a parser; returns what lies behind it."""
        if self._closing:
            return b""
        more = data[self._rest :]
        if more:
            data = data[: self._rest]
        self._rest -= len(data)
        if data:
            self.current.take(data)
        if self._rest:
            self.current.wake()
        else:
            self.on_message_complete()
        return more

    def _learn(self, data: bytes) -> None:
        """Keep a head that was read from the beginning of ``data``, for it may come again."""
        request = self.current
        self._strange += 1
        if (
            request.method == "POST"
            and list(self._line) == [request]
            and request.length
            and request.keep_alive
            and not (request.old or request.expects or self._closing)
            and "Upgrade" not in request.headers
            and "Transfer-Encoding" not in request.headers
        ):
            self._known = learn(data, b"POST ", len(request.headers), request.share_head())

    def _receive(self, data: bytes) -> None:
        """Parse; of more requests than may wait in line only the first few."""
        if not data:
            return
        if len(self._line) + data.count(_END_OF_HEAD) <= limits.MAX_PIPELINED:
            self._parse(data)
        else:
            at = 0
            while at < len(data) and len(self._line) < limits.MAX_PIPELINED and not self._closing:
                self._parse(data[at : at + limits.SLICE_BYTES])
                at += limits.SLICE_BYTES
            if not self._closing:
                self._held = data[at:]
        if len(self._line) > 1 or self._held:
            self._pause()

    def _parse(self, data: bytes) -> None:
        if self._closing:
            return
        self._head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            told = error.__context__
            self._refuse(told if isinstance(told, ApiError) else _NO_HTTP)
            return
        current = self.current
        if not current.method and self._head_bytes > limits.MAX_HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)
            return
        current.wake()

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])

    def _stay(self, rest: bytes) -> None:
        """No other protocol is spoken here: a request that offers one is served as it is. The
        parser has left its body unread, so another one goes on behind an equal head."""
        request = self.current
        chunked = "Transfer-Encoding" in request.headers
        framing = (
            "Transfer-Encoding: chunked" if chunked else f"Content-Length: {request.length or 0}"
        )
        self._parser = httptools.HttpRequestParser(self)
        request.complete = self._between = False
        self._resumes = True
        self._parser.feed_data(f"POST / HTTP/1.1\r\nHost: h\r\n{framing}\r\n\r\n".encode())
        self._resumes = False
        if rest:
            self._feed(rest)

    def pause_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self.drained = self._loop.create_future()

    def resume_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        if self.drained is not None and not self.drained.done():
            self.drained.set_result(None)
        self.drained = None

    def eof_received(self) -> None:
        """Half-closed is closed: only so is a client that left noticed before we write to it."""

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self.lost = True
        self._server.connections.discard(self)
        for timer in (self._timer, self._linger):
            if timer is not None:
                timer.cancel()
        self.resume_writing()
        if self._task is not None:
            self._task.cancel()

    # --- the parser's side

    def on_message_begin(self) -> None:
        """A new request."""
        if not self._resumes:
            self._between = False
            self.current = ServerRequest(self)

    def on_url(self, url: bytes) -> None:
        """May come in pieces."""
        if not self._resumes:
            self.current.target += url.decode("utf-8", "surrogateescape")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are dropped."""
        current = self.current
        if not current.method and not self._resumes:
            current.headers.add(
                name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")
            )

    def on_headers_complete(self) -> None:
        """The head is there: it is enough to begin."""
        if self._resumes:
            return
        current = self.current
        if self._head_bytes > limits.MAX_HEAD_BYTES:  # one read may bring more than is allowed
            pairs = current.headers.items()
            size = len(current.target) + sum(len(name) + len(value) for name, value in pairs)
            if size > limits.MAX_HEAD_BYTES:
                raise _HEAD_TOO_LARGE
        read_head(current, self._parser)
        self._line.append(current)
        if self._task is None:
            self._begin()

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without its framing."""
        self.current.take(data)

    def on_message_complete(self) -> None:
        """The request has been received to its end."""
        self._head_bytes = 0
        self._between = True
        self.current.complete = True
        self.current.wake()
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
            self._go_on(self.current)


class WireServer:
    """Makes connections; knows the open ones."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None) -> None:
        """Needs a running event loop."""
        self.handler = handler
        self._tls = tls
        self.connections: set[ServerConnection] = set()
        self.closing = False
        self.dates = Dates()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> ServerConnection:
        """Called for each new connection."""
        return ServerConnection(self, self._loop)

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Bind; raises ``OSError``. Port 0 takes a free one."""
        return await self._loop.create_server(
            self, host, port, backlog=limits.BACKLOG, ssl=self._tls
        )

    async def listen_on(self, sock: socket) -> asyncio.Server:
        """The same on a socket that is bound; it is ours from now on."""
        return await self._loop.create_server(
            self, sock=sock, backlog=limits.BACKLOG, ssl=self._tls
        )

    async def shutdown(self, grace_s: float) -> None:
        """Close idle connections; those at work are cut after ``grace_s``."""
        self.closing = True
        running: list[asyncio.Task[None]] = []
        for connection in list(self.connections):
            if connection.task is None:
                connection.close()
            else:
                running.append(connection.task)
        if running:
            await asyncio.wait(running, timeout=grace_s)
        for connection in list(self.connections):
            connection.cancel()
        await asyncio.sleep(0)  # transports tell their protocols in the next turn
