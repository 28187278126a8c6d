"""What crosses between the web server, the pipeline and the upstream client: plain values.

Headers are lists of pairs. Hop-by-hop headers, and those named by ``Connection``, end at each hop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from gateway.records import RequestRecord
from shared.errors import ApiError
from shared.types import RequestId

Headers = list[tuple[str, str]]

HOP_BY_HOP = frozenset(
    {
        "connection",
        "http2-settings",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
KEPT_FROM_WORKERS = HOP_BY_HOP | {
    "host",
    "content-length",
    "expect",
    "accept-encoding",
    "authorization",
    "x-api-key",
    "api-key",
    "cookie",
    "x-request-id",
}
"""Request headers that are not forwarded: framing is ours, keys and ids end at the gateway."""

KEPT_FROM_CLIENTS = HOP_BY_HOP | {
    "alt-svc",
    "content-length",
    "date",
    "server",
    "set-cookie",
    "set-cookie2",
    "strict-transport-security",
    "x-request-id",
}
"""Answer headers that are not forwarded: cookies and what binds a browser to an address or to TLS
would bind it to the gateway, for which no worker speaks."""

BODYLESS = frozenset({204, 205, 304})
"""Statuses of answers that end with their head."""
_INTERNAL = "x-headwater-"


def end_to_end(headers: Iterable[tuple[str, str]], drop: Collection[str]) -> Headers:
    """The headers that may cross, in order: neither in ``drop`` nor named by ``Connection``."""
    kept: Headers = []
    named: set[str] = set()
    for name, value in headers:
        lower = name.lower()
        if lower == "connection":
            named.update(part.strip().lower() for part in value.split(","))
        if lower not in drop and not lower.startswith(_INTERNAL):
            kept.append((name, value))
    if named:
        kept = [pair for pair in kept if pair[0].lower() not in named]
    return kept


class Answer(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    body: bytes
    headers: Headers = msgspec.field(default_factory=list)


def error_answer(error: ApiError) -> Answer:
    """The OpenAI-shaped JSON answer of an error, with an honest ``Retry-After``."""
    headers = [("Content-Type", "application/json")]
    if error.retry_after_s is not None:
        headers.append(("Retry-After", str(max(1, math.ceil(error.retry_after_s)))))
    return Answer(error.status, msgspec.json.encode(error.body()), headers)


class Inbound(msgspec.Struct, kw_only=True, eq=False):
    """One request as the pipeline sees it."""

    request_id: RequestId
    """Ours, unique; the client's own is only echoed."""
    route: str
    """Path as in the documentation: a bounded set, fit for a metric label."""
    target: str
    """Path and query for the worker."""
    headers: Mapping[str, str]
    body: bytes
    arrived: float
    """Monotonic seconds."""
    wall_at: float
    """Seconds since the epoch."""
    tenant: str = ""
    """Whose API key it came with; empty where there are none."""
    client_id: str = ""
    """The client's own ``x-request-id`` if it sent one that is short and plain."""
    model: str = ""
    """As the client named it, once the body has been read."""
    memo: dict[str, Any] = {}
    """What was made of the headers; requests whose heads are equal may share it."""
    record: RequestRecord | None = None
    """Of the last attempt, or of the rejection."""


class ClientGone(Exception):
    """The client closed its connection."""


class Client(Protocol):
    """Where the answer goes: one ``send``; or ``start``, any number of ``write``, ``finish``.

    Each may wait for a slow reader and raises :class:`ClientGone`.
    """

    @property
    def started(self) -> bool:
        """A byte of the answer may have left: nothing can be retried any more."""
        ...

    async def send(self, answer: Answer) -> None:
        """A whole answer."""
        ...

    async def start(self, status: int, headers: Headers) -> None:
        """Head of a streamed answer."""
        ...

    async def write(self, data: bytes) -> None:
        """Bytes of a streamed answer, as they are."""
        ...

    @property
    def flowing(self) -> bool:
        """A streamed answer is under way, and its reader keeps up: :meth:`put` may be called."""
        ...

    def put(self, data: bytes) -> None:
        """As :meth:`write`, without waiting; only while :attr:`flowing`."""
        ...

    def put_chunk(self, chunk: bytes) -> None:
        """As :meth:`put`, for a whole chunk of HTTP/1.1, framing included."""
        ...

    async def finish(self) -> None:
        """Clean end of a streamed answer."""
        ...

    def abort(self) -> None:
        """Cut the connection, so that a broken answer cannot be taken for a complete one."""
        ...
