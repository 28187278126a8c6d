"""The web server's edge: one listener of an application, with errors in JSON from the first byte.

What the HTTP parser refuses never reaches a handler, and the library would answer it with a text
that quotes the client, keys included, and write the same to the log.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from shared.errors import ApiError, BadRequest, InternalError
from worker.web import error_response

MAX_FIELD = 32_768
"""Longest header, as in the gateway, which passes them on."""


class JsonErrorHandler(web.RequestHandler):
    """One connection; what is no HTTP is answered in JSON as well."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """An error before or beside our own handlers. Never quotes what the client sent."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        error: ApiError = InternalError("The server failed on this request.")
        if status < 500:
            error = BadRequest("The request is not valid HTTP.")
        response = error_response(error)
        response.force_close()
        return response


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

    def __call__(self) -> JsonErrorHandler:
        """Called for each new connection. Bodies stay as they came: encoded ones are refused."""
        return JsonErrorHandler(
            self,
            loop=asyncio.get_running_loop(),
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
