"""Workers' error answers in the shape that OpenAI clients expect. Pure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from gateway.exchange import Answer, Headers, error_answer
from gateway.records import Outcome
from gateway.upstream import (
    UpstreamBroken,
    UpstreamConnectError,
    UpstreamError,
    UpstreamRefused,
    UpstreamTimeout,
)
from shared import laxjson
from shared.errors import ApiError, DeadlineExceeded, NoCapacity, UpstreamFailed

MAX_ERROR_BYTES = 1 << 20
"""More of an error answer is not read."""
_MESSAGE_CHARS = 2000
SILENT = "timeout"
"""A worker sent nothing for too long."""
MODEL_GONE = "model_gone"
"""A worker does not have the model that it was chosen for: an adapter that was unloaded."""
_CODING = "content-encoding"
_ANY_WINDOW = 47
"""zlib's word for: gzip or zlib, whatever the size of its window."""
_JSON = ("Content-Type", "application/json")


@dataclass(slots=True, eq=False)
class AttemptFailed(Exception):
    """An attempt ended before a byte reached the client."""

    answer: Answer
    """What the client gets if there is no further attempt."""
    reason: str
    """``connect broken timeout error refused model_gone status_5xx``: fit for a metric label."""
    outcome: Outcome = Outcome.UPSTREAM_ERROR
    retry: bool = True


def from_upstream(error: UpstreamError) -> AttemptFailed:
    """A call without an answer: 503 if nobody saw the request, 504 after silence, else 502."""
    if isinstance(error, UpstreamConnectError | UpstreamRefused):
        shown: ApiError = NoCapacity(f"No worker can be reached: {error}.", retry_after_s=1.0)
        return AttemptFailed(error_answer(shown), "connect")
    if isinstance(error, UpstreamTimeout):
        return AttemptFailed(error_answer(DeadlineExceeded(f"{_sentence(error)}.")), SILENT)
    return AttemptFailed(error_answer(UpstreamFailed(f"{_sentence(error)}.")), "broken")


def no_answer() -> AttemptFailed:
    """An answer with status 200 that no client could read."""
    return from_upstream(UpstreamBroken("the worker's answer is no JSON object"))


def from_status(status: int, headers: Headers, body: bytes) -> AttemptFailed:
    """An answer with an error status. 4xx is the client's and final; 5xx may be retried.

    A body in the OpenAI shape passes as it is, or with the fields it lacks; anything else is put
    into that shape.
    """
    kept = [(name, value) for name, value in headers if name.lower() == "retry-after"]
    # A redirect or an interim answer is no answer to a POST; HTTP ends at 599.
    if not 400 <= status < 600:
        shown = UpstreamFailed(f"The worker answered with status {status}.")
        return AttemptFailed(error_answer(shown), "error")
    body = _unpacked(headers, body)
    shaped = _shaped(body, status) or _shape(status, _message_of(status, body))
    answer = Answer(status, shaped, [_JSON, *kept])
    if status == 404 and _code(shaped) == "model_not_found":
        return AttemptFailed(answer, MODEL_GONE, Outcome.CLIENT_ERROR)
    if status < 500:
        return AttemptFailed(answer, "refused", Outcome.CLIENT_ERROR, retry=False)
    return AttemptFailed(answer, "status_5xx")


def _unpacked(headers: Headers, body: bytes) -> bytes:
    """An error's body as text; empty where it is packed in a way that is not understood."""
    codings = [value.strip().lower() for name, value in headers if name.lower() == _CODING]
    if not codings or codings == ["identity"]:
        return body
    if codings[0] not in ("gzip", "x-gzip", "deflate") or len(codings) > 1:
        return b""
    try:
        return zlib.decompressobj(_ANY_WINDOW).decompress(body, MAX_ERROR_BYTES)
    except zlib.error:
        return b""


def from_error_object(error: dict[str, Any]) -> AttemptFailed:
    """An error that came with status 200: as the only content of a stream, or as a JSON answer."""
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else UpstreamFailed.status
    answer = Answer(status, event_body(error, status), [_JSON])
    if status < 500:
        return AttemptFailed(answer, "refused", Outcome.CLIENT_ERROR, retry=False)
    return AttemptFailed(answer, "error")


def event_body(error: dict[str, Any], status: int = UpstreamFailed.status) -> bytes:
    """A worker's error object with all fields that clients look for."""
    message = error.get("message")
    body = {
        **error,
        "message": message if isinstance(message, str) and message else "The worker failed.",
        "type": error.get("type") or _type(status),
        "param": error.get("param"),
        "code": error.get("code"),
    }
    return laxjson.encode({"error": body})


def error_in(body: object) -> dict[str, Any] | None:
    """The error object of a decoded JSON answer."""
    error = body.get("error") if isinstance(body, dict) else None
    if error is None:
        return None
    return error if isinstance(error, dict) else {"message": str(error)}


def decode_json(body: bytes) -> object:
    """The decoded body; None if it is no JSON."""
    try:
        return laxjson.decode(body)
    except laxjson.NotJson:
        return None


def _code(body: bytes) -> object:
    error = error_in(decode_json(body))
    return None if error is None else error.get("code")


def _shaped(body: bytes, status: int) -> bytes | None:
    """The body with all fields that clients look for; None if it has another shape."""
    decoded = decode_json(body)
    error = decoded.get("error") if isinstance(decoded, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    return (
        body if error.keys() >= {"message", "type", "param", "code"} else event_body(error, status)
    )


def _message_of(status: int, body: bytes) -> str:
    decoded = decode_json(body)
    if isinstance(decoded, dict):
        for name in ("message", "detail", "error"):
            value = decoded.get(name)
            if value:
                text = value if isinstance(value, str) else laxjson.encode(value).decode()
                return text[:_MESSAGE_CHARS]
    text = body[: 4 * _MESSAGE_CHARS].decode("utf-8", "replace").strip()
    if not text or text.startswith("<"):
        return f"The worker answered with status {status}."
    return text[:_MESSAGE_CHARS]


def _type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def _shape(status: int, message: str) -> bytes:
    error = {"message": message, "type": _type(status), "param": None, "code": None}
    return laxjson.encode({"error": error})


def _sentence(error: UpstreamError) -> str:
    text = str(error)
    return text[:1].upper() + text[1:]
