"""The web server's edge: one listener of an application, errors in JSON from the first byte."""

from __future__ import annotations

import asyncio

from aiohttp import web

from shared.errors import ApiError
from shared.jsonedge import JsonErrorHandler
from worker.web import error_response

HEAD_S = 45.0
"""A request's head must be complete so long after the connection was made or the last answer sent;
a gateway gives an idle connection up before (``gateway.upstream``), so none is closed under it."""
MAX_FIELD = 32_768
"""Longest header, as in the gateway, which passes them on."""


class Connection(JsonErrorHandler):
    """One connection; what is no HTTP is answered in JSON as well."""

    __slots__ = ()
    FAILED = "The server failed on this request."

    def in_json(self, error: ApiError) -> web.Response:
        """As all errors of a worker."""
        return error_response(error)


class JsonErrorServer(web.Server):
    """A protocol factory for an application's requests; a client that leaves cancels its handler.

    :param app_server: what the application's runner made; it knows handler and request class.
    """

    def __init__(self, app_server: web.Server) -> None:
        """Needs a running event loop."""
        super().__init__(
            app_server.request_handler,
            request_factory=app_server.request_factory,
            handler_cancellation=True,
        )

    def __call__(self) -> Connection:
        """Called for each new connection. Bodies stay as they came: encoded ones are refused."""
        return Connection(
            self,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=HEAD_S,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None, its annotation does not
            auto_decompress=False,
            max_field_size=MAX_FIELD,
        )


async def runner_of(app: web.Application, shutdown_s: float) -> web.ServerRunner:
    """A runner to add sites to; its clean-up gives connections ``shutdown_s`` to end."""
    inner = web.AppRunner(app)
    await inner.setup()
    if inner.server is None:
        raise AssertionError("a runner without a server")
    runner = web.ServerRunner(JsonErrorServer(inner.server), shutdown_timeout=shutdown_s)
    await runner.setup()
    return runner
