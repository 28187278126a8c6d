"""One client's connection: one task per request, in order.

    head -> task(handler) ... body -> answer -> (next request of the connection | close)

- What the reading side (``intake.py``) refuses is answered (400), and the connection closed.
- Requests behind the one being answered wait in line, and reading pauses meanwhile. What one read
  brought beyond a few of them stays unread bytes until it is their turn.
- The next request waits until the client has taken in what was answered before.
- A client that leaves cancels its handler.
- After an answer before the end of a body the rest is read and thrown away for a while: closed at
  once, the client might never see the answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

from gateway.exchange import error_answer
from gateway.wire import limits
from gateway.wire.answers import whole_head
from gateway.wire.intake import Intake
from gateway.wire.request import ServerRequest
from shared.errors import ApiError

if TYPE_CHECKING:
    from gateway.wire.server import WireServer

_END_OF_HEAD = b"\r\n\r\n"


class ServerConnection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "_closing",
        "_held",
        "_idle_since",
        "_intake",
        "_line",
        "_linger",
        "_loop",
        "_paused",
        "_server",
        "_task",
        "_timer",
        "_transport",
        "_unsent",
        "drained",
        "lost",
    )

    def __init__(self, server: WireServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop = server, loop
        self._transport: asyncio.Transport | None = None
        self._line: deque[ServerRequest] = deque()
        """Requests whose head has come, the one being answered first."""
        self._task: asyncio.Task[None] | None = None
        self.drained: asyncio.Future[None] | None = None
        """A slow reader keeps what is sent from leaving; until when."""
        self._timer: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._held = b""
        """What one read brought beyond the requests that may wait in line."""
        self._unsent = 0
        self._paused = False
        self._closing = False
        """Nothing that still comes is looked at."""
        self._idle_since: float | None = None
        self.lost = False
        self._intake = Intake(self)

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
    def date(self) -> bytes:
        """The ``Date`` header's line."""
        return self._server.dates.line()

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
        if request.broken:  # of what still comes nothing can be understood
            self._closing = True
            self._await_rest(end=True)
        elif not request.complete:
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

    def refuse(self, error: ApiError) -> None:
        """What came is no HTTP, or too much of it. Never quotes what the client sent."""
        self._closing = True
        current = self._intake.current
        if self._task is not None:
            current.broken = True
            current.wake()
            if current is not self._line[0]:
                return  # an answer to an earlier request is on its way; then the end
            self._closing = False  # its handler says what is wrong
            current.keep_alive = False
            return
        if self._linger is not None:
            return  # it has its answer already; what still comes is thrown away until the end
        answer = error_answer(error)
        self.send(whole_head(answer, self.date, close=True) + answer.body)
        self._await_rest(end=True)

    # --- the reading side's

    def fresh(self) -> ServerRequest:
        """See :class:`gateway.wire.intake.Taker`."""
        return ServerRequest(self)

    def came(self, request: ServerRequest) -> None:
        """See :class:`gateway.wire.intake.Taker`."""
        self._line.append(request)
        if self._task is None:
            self._begin()

    def through(self, request: ServerRequest) -> None:
        """See :class:`gateway.wire.intake.Taker`."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
            self._go_on(request)

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
        elif not self._closing:
            idle = not self._line
            rest = self._intake.shortcut(data, idle=idle)
            if rest:
                first = idle and rest is data and self._intake.between
                self._receive(rest)
                if first and list(self._line) == [self._intake.current]:
                    self._intake.learn(data)

    def _receive(self, data: bytes) -> None:
        """Parse; of more requests than may wait in line only the first few."""
        if self._closing:
            return
        if len(self._line) + data.count(_END_OF_HEAD) <= limits.MAX_PIPELINED:
            self._intake.parse(data)
        else:
            at = 0
            while at < len(data) and len(self._line) < limits.MAX_PIPELINED and not self._closing:
                self._intake.parse(data[at : at + limits.SLICE_BYTES])
                at += limits.SLICE_BYTES
            if not self._closing:
                self._held = data[at:]
        if len(self._line) > 1 or self._held:
            self._pause()

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
