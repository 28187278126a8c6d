"""HTTP matters common to all routes: errors as JSON, request ids, keys, bodies."""

from __future__ import annotations

import hmac
import math
import re
import uuid
from collections.abc import Collection

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from shared import slowbody
from shared.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    InternalError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    Unauthorized,
    UnsupportedMediaType,
)
from shared.openai import error_body

REQUEST_ID = "x-request-id"
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_ID_KEY = web.RequestKey("request_id", str)


def new_id() -> str:
    """A fresh internal id (32 hex digits); never what a client sent."""
    return uuid.uuid4().hex


def json_response(value: object, *, status: int = 200) -> web.Response:
    """``value`` as JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    """The JSON form of an error with its status, ``Retry-After`` and ``Allow``."""
    response = web.Response(
        body=error_body(error), status=error.status, content_type="application/json"
    )
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure becomes an OpenAI-shaped body; what we did not expect is logged, not shown."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        response = error_response(_translated(error, request))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        # The client has gone; there is nobody to tell.
        raise
    except Exception:  # noqa: BLE001 - the process's boundary: logged, and a proper 500
        structlog.get_logger("worker.web").exception("request_failed", path=request.path)
        return error_response(InternalError("The server failed on this request."))


def _translated(error: web.HTTPException, request: web.Request) -> ApiError:
    if error.status == 404:
        return NotFound(f"No route {request.method} {request.path[:128]}.", code="not_found")
    if error.status == 405:
        return MethodNotAllowed(f"{request.method} is not allowed on {request.path[:128]}.")
    if error.status == 413:
        return PayloadTooLarge("The request body is too large.")
    if 400 <= error.status < 500:
        return BadRequest(error.reason)
    return InternalError(error.reason)


def request_id(request: web.Request) -> str:
    """The client's id if it is short and plain, else one of ours; the same for one request."""
    known = request.get(_ID_KEY)
    if known is None:
        sent = request.headers.get(REQUEST_ID, "")
        known = request[_ID_KEY] = sent if _PLAIN_ID.fullmatch(sent) else f"req-{new_id()}"
    return known


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: put the id on every response, streams included."""
    response.headers[REQUEST_ID] = request_id(request)


def bearer_matches(request: web.Request, accepted: Collection[str]) -> bool:
    """Whether the request carries one of the tokens; takes the same time for all of them."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    # A header may hold any bytes; what is no UTF-8 comes as lone surrogates.
    given = token.strip().encode("utf-8", "surrogateescape")
    sent = given if scheme.lower() == "bearer" else b""
    # All are compared: the time taken must not tell which one came close.
    matches = [hmac.compare_digest(sent, key.encode()) for key in accepted]
    return any(matches)


def require_bearer(accepted: Collection[str], open_paths: Collection[str]) -> Middleware:
    """Middleware: 401 without a token or with a wrong one, but on ``open_paths``."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in open_paths and not bearer_matches(request, accepted):
            if "Authorization" in request.headers:
                raise Unauthorized("The key is not valid here.")
            raise Unauthorized("A key is required: 'Authorization: Bearer ...'.")
        return await handler(request)

    return check


@web.middleware
async def refuse_browsers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A web page must not reach a loopback listener through its visitor's browser."""
    if "Origin" in request.headers or "Sec-Fetch-Site" in request.headers:
        raise Forbidden("Requests made by web pages are not accepted here.")
    return await handler(request)


async def read_body(request: web.Request, limit: int) -> bytes:
    """The body of a JSON request; raises 415 for another content type or an encoding, 413 beyond
    ``limit``, and 408 if it comes too slowly."""
    declared = request.headers.get("Content-Type")
    kind = request.content_type.lower()
    is_json = kind in ("application/json", "text/json") or kind.endswith("+json")
    if declared and not is_json:
        raise UnsupportedMediaType(
            f"The content type must be application/json, not {kind[:64]!r}.", param="content-type"
        )
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(
            f"The content encoding {encoding[:64]!r} is not supported.", param="content-encoding"
        )
    if request.content_length is not None and request.content_length > limit:
        raise PayloadTooLarge(f"The request body is larger than {limit} bytes.")
    try:
        return await slowbody.received(request.content, limit)
    except web.RequestPayloadError:
        raise BadRequest("The body's framing is broken.") from None
