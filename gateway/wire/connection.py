"""One connection to a worker: a protocol that serves one exchange after the other.

    begin -> head -> read ... read -> b"" -> (begin | abort)

What comes is parsed by llhttp in its strict mode; everything it refuses breaks the exchange. The
reader pulls: at most about ``READ_BYTES`` lie here unread, then reading from the socket pauses.
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

from gateway.exchange import Headers
from gateway.upstream import (
    READ_BYTES,
    Taker,
    UpstreamBroken,
    UpstreamCut,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.wire.known import KnownHead, learn, parted

MAX_HEAD_BYTES = 65_536
"""All heads of one answer together, interim ones included."""

STRANGE_HEADS = 8
"""After so many answers in a row whose heads differ, those of a connection are not compared."""

RawHeaders = list[tuple[bytes, bytes]]

_SECOND_LOOK_S = 0.01
"""From the end of a time limit to its word: the loop reads in between."""
_FRAMED = (b"content-length", b"transfer-encoding")


class Told:
    """What a head of an answer that may come again was found to say."""

    __slots__ = ("content_type", "headers", "raw")

    def __init__(self, raw: RawHeaders) -> None:
        self.raw = raw
        self.headers: Headers | None = None
        """Those that go on to the client; None: nobody has looked yet."""
        self.content_type = ""


class Connection(asyncio.Protocol):
    """Owned by one caller at a time; see the pool in ``client.py``."""

    __slots__ = (
        "_between",
        "_buffered",
        "_error",
        "_extra",
        "_head_bytes",
        "_idle_s",
        "_interim",
        "_keep",
        "_learns",
        "_loop",
        "_met",
        "_overdue",
        "_parser",
        "_paused",
        "_pieces",
        "_rest",
        "_since",
        "_skips",
        "_strange",
        "_taker",
        "_timer",
        "_timer_at",
        "_transport",
        "_unsent",
        "_waiter",
        "busy",
        "complete",
        "has_head",
        "headers",
        "heard",
        "idle_since",
        "known",
        "lost",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, *, learns: bool = True) -> None:
        """``learns``: nobody reads the length and the date in the heads of answers."""
        self._loop = loop
        self._learns = learns
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Taker | None = None
        """Of him who waits."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._overdue = 0.0
        """Since when nothing had come when the timer last found that to be too long."""
        self.lost = False
        """The connection is no more."""
        self.busy = False
        """An exchange is under way."""
        self.idle_since = 0.0
        self._met: KnownHead[Told] | None = None
        """The head of an earlier answer, if it may come again."""
        self._strange = 0
        """Heads in a row that were others."""
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: RawHeaders = []
        self.heard = False
        """A byte of an answer has come."""
        self.has_head = False
        self.complete = False
        """The answer has been received to its end."""
        self.known: Told | None = None
        """Of the answer that is being read, if its head was or can be met again."""
        self._rest = 0
        """So much is to come of a body whose head was known: it needs no parser."""
        self._between = False
        """The chunk that was begun last has ended."""
        self._skips = False
        """The parser stands between two chunks, and may be spared the next one."""
        self._keep = self._extra = self._interim = self._paused = False
        self._pieces: list[bytes] = []
        self._buffered = self._head_bytes = self._unsent = 0
        self._error: UpstreamError | None = None

    # --- the caller's side

    def begin(self, head: bytes, body: bytes, idle_s: float) -> None:
        """Send a request. Nothing of an earlier answer may be read after that."""
        assert self._transport is not None
        assert not self.busy
        self._reset()
        self._idle_s, self.busy = idle_s, True
        if len(body) <= READ_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    async def head(self) -> None:
        """Wait for the head of the answer. Raises UpstreamBroken or UpstreamTimeout."""
        while not self.has_head:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self, taker: Taker | None = None) -> bytes:
        """The next bytes of the body, ``b""`` at the clean end. Raises as :meth:`head` does.

        :param taker: what it accepts is its own, as it comes.
        """
        while True:
            if self._pieces:
                data = self._taken()
                if taker is None or not taker.take(data):
                    return data
                continue
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            self._taker = taker
            await self._wait()

    def rest(self) -> bytes | None:
        """What is left of the body, if all of it is there; None: it is not, or is broken."""
        if not self.complete:
            return None
        return self._taken() if self._pieces else b""

    def end(self) -> bool:
        """The exchange is over; whether the connection can serve another one."""
        self.busy = False
        usable = self.complete and self._keep and not self._extra and not self.lost
        if usable and self._transport is not None and self._transport.get_write_buffer_size():
            usable = False  # answered before it was read: another request would wait behind it
        if not usable:
            self.abort()
        return usable

    def abort(self) -> None:
        """Cut the connection."""
        self.busy = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None and not self.lost:
            self._transport.abort()

    def _taken(self) -> bytes:
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self) -> None:
        self._waiter = waiter = self._loop.create_future()
        self._since = now = self._loop.time()
        # One timer serves many waits: it looks at the clock when it fires, and goes on from there.
        if self._timer is None or self._timer_at > now + self._idle_s:
            self._arm(now + self._idle_s)
        try:
            await waiter
        finally:
            self._waiter = self._taker = None

    def _skipped(self, data: bytes, taker: Taker) -> bool:
        """Whether ``data`` was a whole chunk that could be given away at once. The parser, which
        stands between two chunks, still does afterwards: it never learns of this one."""
        waiter = self._waiter
        if waiter is None or waiter.done() or not taker.take_chunk(data):
            return False
        self._since = self._loop.time()
        return True

    def _given(self, taker: Taker) -> bool:
        """Whether what has come could be given away at once; whoever waits goes on waiting."""
        pieces, waiter = self._pieces, self._waiter
        # One piece in one read, as chunks come; more of them are taken together by the reader.
        if self.complete or len(pieces) != 1 or waiter is None or waiter.done() or self._paused:
            return False
        if taker.take(pieces[0]):
            pieces.clear()
            self._buffered = 0
            self._since = self._loop.time()
            return True
        return False

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._look), at

    def _look(self) -> None:
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # nobody waits: the next one who does sets it again
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        now = self._loop.time()
        if unsent != self._unsent:  # the worker is still taking in a long request
            self._unsent, self._since = unsent, now
        if now < self._since + self._idle_s:
            self._arm(self._since + self._idle_s)
        elif self._overdue != self._since:
            # A loop that was busy for long may have answers that it has not read: it does so first.
            self._overdue = self._since
            self._arm(now + _SECOND_LOOK_S)
        else:
            waiter.set_exception(UpstreamTimeout("the worker sent nothing for too long"))

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _break(self, reason: str) -> None:
        if self._error is None and not self.complete:
            self._error = UpstreamBroken(reason)
        self._extra = True
        self._wake()
        if self._transport is not None:
            self._transport.abort()

    # --- the event loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._skips and (taker := self._taker) is not None and self._skipped(data, taker):
            return
        if not self.busy:  # nobody asked
            self.abort()
            return
        first = not self.heard
        self.heard = True
        try:
            if self._rest:
                data = self._body_piece(data)
            elif first and (met := self._met) is not None and (at := met.end_in(data)):
                data = self._known_answer(met, data, at)
            if data:
                if not first and self.has_head:
                    self._parser.feed_data(data)
                else:
                    self._parse(data, first)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break("the worker's answer is no valid HTTP")
            return
        self._skips = self._between and data.endswith(b"\r\n")
        if not self.has_head and self._head_bytes > MAX_HEAD_BYTES:
            self._break("the head of the worker's answer is too long")
            return
        if self._buffered > READ_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self.has_head and (self._taker is None or not self._given(self._taker)):
            self._wake()

    def _parse(self, data: bytes, first: bool) -> None:
        """``first``: nothing of the answer has come before."""
        if not self.has_head:
            self._head_bytes += len(data)
        self._parser.feed_data(data)
        if first and self.complete and self._keep and self._strange < STRANGE_HEADS:
            self._learn(data)

    def _learn(self, data: bytes) -> None:
        """Keep the head of a whole answer, for it may come again."""
        if self._learns and self.status == 200 and self.known is None:
            self._strange += 1
            told = Told(self.headers)
            self._met = learn(data, b"HTTP/1.1 200 ", len(self.headers), told, dated=True)
            self.known = None if self._met is None else told

    def _known_answer(self, met: KnownHead[Told], data: bytes, at: int) -> bytes:
        """An answer begins whose body is at ``at``; returns what lies behind it."""
        self._strange = 0
        self.known = met.meaning
        self.status, self.has_head, self.headers = 200, True, met.meaning.raw
        self._rest = met.length
        return self._body_piece(data[at:])

    def _body_piece(self, data: bytes) -> bytes:
        """More of a body without a parser; returns what lies behind it."""
        data, more = parted(data, self._rest)
        self._rest -= len(data)
        if data:
            self._pieces.append(data)
            self._buffered += len(data)
        if not self._rest:
            self.complete = self._keep = True
        return more

    def eof_received(self) -> None:
        """See :class:`asyncio.Protocol`: the connection is closed then."""

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.busy or self.complete:
            return
        unframed = self.has_head and not any(name.lower() in _FRAMED for name, _ in self.headers)
        if unframed and exc is None:
            self.complete = True  # the body's end is the connection's
        elif self._error is None:
            self._error = UpstreamCut("the worker broke off its answer")
        self._wake()

    # --- the parser's side

    def on_message_begin(self) -> None:
        """A second answer to one request is an attempt to slip something in."""
        if self.complete:
            self._extra = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are dropped."""
        if not self.has_head:
            self.headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """An interim answer (1xx) is skipped."""
        if self.has_head:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self._interim = True
            self.headers.clear()
            return
        codings = b",".join(v for n, v in self.headers if n.lower() == b"transfer-encoding")
        if codings and codings.strip().lower() != b"chunked":
            raise httptools.HttpParserError("a transfer coding that nobody asked for")
        self.status, self.has_head = status, True

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without its framing."""
        if not self.complete:
            self._pieces.append(data)
            self._buffered += len(data)

    def on_chunk_header(self) -> None:
        """The size of a chunk has come."""
        self._between = False

    def on_chunk_complete(self) -> None:
        """All of it has come, the line end behind it included."""
        self._between = True

    def on_message_complete(self) -> None:
        """The end of an answer, or of an interim one."""
        if self._interim:
            self._interim = False
        elif not self.complete:
            self.complete, self._keep = True, self._parser.should_keep_alive()
