"""What aiohttp's parser refuses, or what fails beside a handler, is answered in JSON as well.

None of it reaches a handler, and the library would answer with a text that quotes the client, keys
included, and write the same to the log.
"""

from __future__ import annotations

from typing import ClassVar

from aiohttp import web

from shared.errors import ApiError, BadRequest, InternalError


class JsonErrorHandler(web.RequestHandler):
    """One connection; those of a server say how its errors look."""

    __slots__ = ()
    FAILED: ClassVar[str]
    """What a client is told of a fault of the server's own."""

    def in_json(self, error: ApiError) -> web.Response:
        """The answer of an error, as this server gives them."""
        raise NotImplementedError

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
        error: ApiError = InternalError(self.FAILED)
        if status < 500:
            error = BadRequest("The request is not valid HTTP.")
        response = self.in_json(error)
        response.force_close()
        return response
