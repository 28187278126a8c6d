"""The reading side of a client's connection: bytes in, requests out, in order.

llhttp parses; heads that were met before on the connection do without it (``known.py``). What comes
out goes to a :class:`Taker`. llhttp is strict: what could be framed in two ways is refused.
"""

from __future__ import annotations

from typing import Protocol

import httptools

from gateway.wire import limits
from gateway.wire.heading import read_head
from gateway.wire.known import KnownHead, learn, parted
from gateway.wire.request import Meaning, ServerRequest
from shared.errors import ApiError, BadRequest, HeadTooLarge

_NO_HTTP = BadRequest("The request is not valid HTTP.")
_HEAD_TOO_LARGE = HeadTooLarge(
    f"The request line and headers are larger than the limit of {limits.MAX_HEAD_BYTES} bytes."
)


class Taker(Protocol):
    """Who serves what comes."""

    def fresh(self) -> ServerRequest:
        """A request of this connection, with nothing in it."""
        ...

    def came(self, request: ServerRequest) -> None:
        """Its head is there: it is enough to begin."""
        ...

    def through(self, request: ServerRequest) -> None:
        """It has been received to its end."""
        ...

    def refuse(self, error: ApiError) -> None:
        """What came is no HTTP, or too much of it."""
        ...


class Intake:
    """One connection's; a protocol for httptools."""

    __slots__ = (
        "_head_bytes",
        "_known",
        "_parser",
        "_rest",
        "_resumes",
        "_strange",
        "_taker",
        "between",
        "current",
    )

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        """Read since there was last something of use: a head, a piece of a body, an end."""
        self._resumes = False
        """What is parsed is the head that :meth:`_stay` puts before a body."""
        self._known: KnownHead[Meaning] | None = None
        """The head that was parsed last, if it may come again."""
        self._strange = 0
        """Heads in a row that were others."""
        self._rest = 0
        """So much is to come of a body whose head was known: it needs no parser."""
        self.between = True
        """The parser waits for the beginning of a request."""
        self.current = taker.fresh()
        """Whose head or body is being read."""

    # --- the short cut

    def shortcut(self, data: bytes, *, idle: bool) -> bytes:
        """Take what needs no parser; returns what does.

        :param idle: no request is in line.
        """
        if self._rest:
            return self._body_piece(data)
        known = self._known
        if known is None or not idle or not self.between or not (at := known.end_in(data)):
            return data
        self._strange = 0
        self.current = request = self._taker.fresh()
        request.has_head(known.meaning)
        request.length = self._rest = known.length
        self._taker.came(request)
        if self._rest > len(data) - at:
            # More of it is to come, and all of it is put together then: no need to copy it twice.
            request.take(memoryview(data)[at:])
            self._rest -= len(data) - at
            return b""
        return self._body_piece(data[at:])

    def _body_piece(self, data: bytes) -> bytes:
        """More of a body without a parser; returns what lies behind it."""
        data, more = parted(data, self._rest)
        self._rest -= len(data)
        if data:
            self.current.take(data)
        if self._rest:
            self.current.wake()
        else:
            self.on_message_complete()
        return more

    def learn(self, data: bytes) -> None:
        """``data`` was one request's beginning, and nothing was in line before it: its head may
        come again."""
        if self._strange >= limits.STRANGE_HEADS:
            return
        self._strange += 1
        request = self.current
        headers = request.headers
        if (
            request.method == "POST"
            and request.length
            and request.keep_alive
            and not (request.old or request.expects)
            and "Upgrade" not in headers
            and "Transfer-Encoding" not in headers
        ):
            self._known = learn(data, b"POST ", len(headers), request.share_head())

    # --- the parser

    def parse(self, data: bytes) -> None:
        """Everything else."""
        self._head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            told = error.__context__
            self._taker.refuse(told if isinstance(told, ApiError) else _NO_HTTP)
            return
        if self._head_bytes > limits.MAX_HEAD_BYTES:  # of a head, of a chunk's, or of trailers
            self._taker.refuse(_HEAD_TOO_LARGE)
            return
        self.current.wake()

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
        request.complete = self.between = False
        self._resumes = True
        self._parser.feed_data(f"POST / HTTP/1.1\r\nHost: h\r\n{framing}\r\n\r\n".encode())
        self._resumes = False
        if rest:
            self._feed(rest)

    def on_message_begin(self) -> None:
        """A new request."""
        if not self._resumes:
            self.between = False
            self.current = self._taker.fresh()

    def on_url(self, url: bytes) -> None:
        """May come in pieces."""
        if not self._resumes:
            self.current.target += url.decode("utf-8", "surrogateescape")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are dropped."""
        current = self.current
        if not current.method and not self._resumes:
            value = value.rstrip(b" \t")  # llhttp takes away what stands before it only
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
        self._head_bytes = 0
        self._taker.came(current)

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without its framing."""
        self._head_bytes = 0
        self.current.take(data)

    def on_message_complete(self) -> None:
        """The request has been received to its end."""
        self._head_bytes = 0
        self.between = True
        self.current.complete = True
        self.current.wake()
        self._taker.through(self.current)
