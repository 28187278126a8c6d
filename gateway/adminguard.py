"""The edge of an admin listener: who may use it, what keeps foreign web pages away, and errors."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Awaitable, Callable
from hmac import compare_digest

import structlog
from aiohttp import web

from gateway.browsers import refuse_foreign_pages, refuse_other_sites
from gateway.dashboard.pages import PAGE
from gateway.exchange import Answer, ClientGone, error_answer
from gateway.httpserver import whole
from shared.errors import ApiError, InternalError, Unauthorized

Handler = Callable[[web.BaseRequest], Awaitable[Answer | web.StreamResponse]]


class Guard:
    """``token``: empty asks for none and trusts programs of this machine only."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._log = structlog.get_logger("headwater.admin")

    async def admit(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """What a handler answers to those who may ask; what goes wrong is an answer in JSON too."""
        path = request.rel_url.raw_path
        try:
            self.check(request)
            answer = await handler(request)
        except ApiError as error:
            answer = error_answer(error)
            if isinstance(error, Unauthorized):
                answer.headers.append(("WWW-Authenticate", challenge(path)))
        except ClientGone as error:
            raise ConnectionResetError from error
        except Exception:  # noqa: BLE001 - the edge: whatever it is, the caller gets JSON
            self._log.exception("admin_request_failed", path=request.path)
            answer = error_answer(InternalError("The gateway failed."))
        return whole(answer) if isinstance(answer, Answer) else answer

    def check(self, request: web.BaseRequest) -> None:
        """Raise ``Unauthorized`` or ``Forbidden``."""
        page = request.rel_url.raw_path == PAGE
        if not self._token:
            refuse_foreign_pages(request.headers, page=page)
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        sent = given.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "basic":
            # What a browser asked its user for, it also sends for pages of other sites.
            refuse_other_sites(request.headers, page=page)
            sent = _password(sent)
        elif scheme.lower() != "bearer":
            sent = b""
        if not compare_digest(sent, self._token):
            raise Unauthorized("The admin token is required.")


def challenge(path: str) -> str:
    """How to prove oneself. Browsers ask for a name (any) and a password (the token)."""
    return 'Basic realm="headwater", charset="UTF-8"' if path.startswith(PAGE) else "Bearer"


def _password(credentials: bytes) -> bytes:
    """Of Basic credentials; empty if they are none."""
    try:
        return b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""
