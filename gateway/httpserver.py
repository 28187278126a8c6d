"""The web server's edge: aiohttp's low-level server with OpenAI-shaped errors and firm limits.

Limits on slow clients: a request head must be complete ``HEAD_S`` after the connection was made or
the last answer was sent; bodies: ``shared.slowbody``. Answers are not limited by these.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from socket import socket
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from gateway.exchange import Answer, ClientGone, error_answer
from shared import slowbody
from shared.errors import (
    ApiError,
    BadRequest,
    PayloadTooLarge,
    UnsupportedMediaType,
)
from shared.jsonedge import JsonErrorHandler

HEAD_S = 30.0
"""Also how long an idle connection is kept."""
LINGER_S = 5.0
"""After an early answer, how long the rest of a body is read and thrown away."""
BACKLOG = 4096
SERVER = "headwater"

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connection(JsonErrorHandler):
    """One connection; what is no HTTP is answered in JSON as well."""

    __slots__ = ()
    FAILED = "The gateway failed."

    def in_json(self, error: ApiError) -> web.Response:
        """As all errors of the gateway."""
        return whole(error_answer(error))


class HttpServer(web.Server):
    """A protocol factory for ``loop.create_server``; a client that leaves cancels its handler."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None) -> None:
        """Needs a running event loop."""
        super().__init__(handler, handler_cancellation=True)
        self._tls = tls

    def __call__(self) -> Connection:
        """Called for each new connection."""
        return Connection(
            self,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=HEAD_S,
            lingering_time=LINGER_S,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None, its annotation does not
            auto_decompress=False,
            max_field_size=32_768,
        )

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Bind; raises ``OSError``. Port 0 takes a free one."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(self, host, port, backlog=BACKLOG, ssl=self._tls)

    async def listen_on(self, sock: socket) -> asyncio.Server:
        """The same on a socket that is bound; it is ours from now on."""
        return await asyncio.get_running_loop().create_server(self, sock=sock, backlog=BACKLOG)


def bound_port(server: asyncio.Server) -> int:
    """The port that a listener got."""
    return int(server.sockets[0].getsockname()[1])


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """How a listener is reached from this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    scheme, bare = "https" if tls else "http", shown.strip("[]")
    return f"{scheme}://[{bare}]:{port}" if ":" in bare else f"{scheme}://{bare}:{port}"


def whole(answer: Answer) -> web.Response:
    """The web server's form of a whole answer."""
    headers = CIMultiDict(answer.headers)
    headers.setdefault("Server", SERVER)
    return web.Response(status=answer.status, body=answer.body, headers=headers)


def json_answer(body: object, status: int = 200) -> Answer:
    """A JSON answer."""
    return Answer(status, msgspec.json.encode(body), [("Content-Type", "application/json")])


def check_json(headers: Mapping[str, str]) -> None:
    """Refuse a body that is not declared as plain JSON."""
    kind = headers.get("Content-Type", "").split(";", 1)[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        shown = f"not '{kind[:100]}'" if kind else "but there is none"
        raise UnsupportedMediaType(f"The content type must be application/json, {shown}.")
    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"The content encoding '{encoding[:100]}' is not supported.")


async def read_body(request: web.BaseRequest, limit: int) -> bytes:
    """The whole body; at most ``limit`` bytes are ever held.

    Raises :class:`PayloadTooLarge`, :class:`RequestTimeout`, ``BadRequest`` for broken framing, and
    :class:`ClientGone`.
    """
    if request.content_length is not None and request.content_length > limit:
        raise PayloadTooLarge(f"The body is larger than the limit of {limit} bytes.")
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        return await slowbody.received(request.content, limit)
    except web.RequestPayloadError:
        raise BadRequest("The body's framing is broken.") from None
    except ConnectionError as error:
        raise ClientGone from error


def json_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; raises ``BadRequest``."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest("The body must be a JSON object.") from None
