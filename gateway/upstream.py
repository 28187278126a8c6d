"""Calls to workers: open, read, close, with deadlines. What every client of this kind does.

``wire/client.py`` is the one in use; ``upstream_aiohttp.py`` does the same with aiohttp.

Back-pressure is by pulling: nothing is read from a worker that the caller did not ask for (beyond
one buffer). Leaving the context before the end of the answer closes the connection, which is how a
worker learns that nobody reads on. Bodies are never unpacked and redirects never followed.

A pooled connection may have been closed by the worker just as it is used again. Whether the worker
saw the request can then not be known; as no byte of an answer came, it is sent once more on another
connection to the same worker. On a fresh connection the same event counts as a broken answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from gateway.exchange import Headers
from shared.errors import HeadwaterError

READ_BYTES = 65_536
"""How much is read ahead of a slow client, per answer."""
IDLE_CONNECTION_S = 30.0
MAX_STALE = 16
"""Kept connections in a row that may turn out to be closed already."""


class UpstreamError(HeadwaterError):
    """A worker gave no (complete) answer; the message is fit for a client."""


class UpstreamConnectError(UpstreamError):
    """No connection: the worker has seen nothing of the request."""


class UpstreamBroken(UpstreamError):
    """The connection broke, or what came is no HTTP."""


class UpstreamCut(UpstreamBroken):
    """The worker closed the connection before its answer was complete."""


class UpstreamTimeout(UpstreamError):
    """Nothing came for longer than the idle limit."""


class UpstreamRefused(UpstreamError):
    """The address cannot be called at all."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of one call, in seconds."""

    connect_s: float
    """Name look-up, connection and TLS."""
    idle_s: float
    """Longest silence, also before the head of the answer."""


class Taker(Protocol):
    """Accepts what comes of a body, or does not. Neither waits nor raises."""

    def take(self, data: bytes) -> bool:
        """Bytes of the body."""
        ...

    def take_chunk(self, data: bytes) -> bool:
        """What came may be one chunk of HTTP/1.1, framing included: a chunk does begin here. To be
        accepted only if it is a whole one, and nothing besides."""
        ...


class UpstreamResponse(Protocol):
    """An answer whose head has come. Valid inside the context that gave it."""

    @property
    def status(self) -> int:
        """HTTP status."""
        ...

    @property
    def headers(self) -> Headers:
        """End-to-end headers, without the length."""
        ...

    @property
    def content_type(self) -> str:
        """Media type in lower case without parameters; empty if none was given."""
        ...

    async def read(self) -> bytes:
        """The next bytes, as soon as there are some; ``b""`` at the clean end.

        Raises :class:`UpstreamBroken` or :class:`UpstreamTimeout`.
        """
        ...

    def rest(self) -> bytes | None:
        """All that is left of the body, if its clean end has come already; None: it must be read.
        Nothing is left to be read after it."""
        ...

    async def pass_on(self, taker: Taker) -> bytes:
        """As :meth:`read`, for bytes that the taker does not accept: what it accepts is its own,
        and may be given to it as it comes, without a turn of the event loop.

        :param taker: called only while this is awaited.
        """
        ...

    async def settle(self, grace_s: float) -> None:
        """Throw away what is left if it ends within ``grace_s``, so that the connection is kept."""
        ...


class Upstream(Protocol):
    """Opens calls. One contract suite: tests/contracts/test_upstream.py."""

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
        """One call to ``url + path``. Entering waits for the head and raises UpstreamError."""
        ...

    async def close(self) -> None:
        """Close all connections; no call follows."""
        ...
