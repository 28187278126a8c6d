"""The exception tree. Every error a user can meet has a status, a code and a "whose fault".

HeadwaterError
|-- ConfigError                      exit code 2, one line
`-- ApiError                         becomes {"error": {message, type, param, code}}
    |-- BadRequest            400    the client's
    |   |-- ContextLengthExceeded    400, code context_length_exceeded
    |-- Unauthorized          401
    |-- Forbidden             403
    |-- ModelNotFound         404    code model_not_found
    |-- NotFound              404
    |-- MethodNotAllowed      405
    |-- PayloadTooLarge       413
    |-- UnsupportedMediaType  415
    |-- RateLimited           429    has retry_after_s
    |-- HeadTooLarge          431
    |-- InternalError         500    ours
    |-- NotImplementedHere    501
    |-- UpstreamFailed        502    the worker's
    |-- NoCapacity            503    has retry_after_s
    `-- DeadlineExceeded      504
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class HeadwaterError(Exception):
    """Root of everything Headwater raises on purpose."""


class ConfigError(HeadwaterError):
    """Wrong usage or configuration; shown as one line ``key: value: reason`` with exit code 2."""

    def __init__(self, key: str, value: object, reason: str) -> None:
        super().__init__(f"{key}: {value!r}: {reason}")
        self.key, self.value, self.reason = key, value, reason


class ApiError(HeadwaterError):
    """An error that an HTTP client sees, in the OpenAI shape."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body that goes with :attr:`status`."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class BadRequest(ApiError):
    """400: the request is malformed or asks for what cannot be done."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """400: prompt (plus what was asked for) is beyond the model's length or the whole KV pool."""

    default_code = "context_length_exceeded"


class Unauthorized(ApiError):
    """401: no key or a wrong one."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(ApiError):
    """403: a valid key without the right to do this."""

    status = 403
    type = "permission_error"


class NotFound(ApiError):
    """404: no such route or object."""

    status = 404
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    """404: nobody serves this model."""

    default_code = "model_not_found"


class MethodNotAllowed(ApiError):
    """405. ``allowed``: the methods that the route takes, as far as that is to be told."""

    status = 405
    type = "invalid_request_error"

    def __init__(self, message: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class RequestTimeout(ApiError):
    """408: the request did not come in time."""

    status = 408
    type = "invalid_request_error"


class PayloadTooLarge(ApiError):
    """413: the body is over the configured limit."""

    status = 413
    type = "invalid_request_error"


class UnsupportedMediaType(ApiError):
    """415: the body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"


class HeadTooLarge(ApiError):
    """431: the request line and its headers are over the limit."""

    status = 431
    type = "invalid_request_error"


class RateLimited(ApiError):
    """429: a tenant's limit; ``retry_after_s`` becomes ``Retry-After``."""

    status = 429
    type = "rate_limit_error"


class InternalError(ApiError):
    """500: our fault."""


class NotImplementedHere(ApiError):
    """501: the request needs a part of HTTP that is not spoken here."""

    status = 501
    type = "invalid_request_error"


class UpstreamFailed(ApiError):
    """502: the worker broke off, or answered something that is no answer."""

    status = 502
    default_code = "upstream_failed"


class NoCapacity(ApiError):
    """503: no worker can take this now; ``retry_after_s`` becomes ``Retry-After``."""

    status = 503
    default_code = "no_capacity"


class DeadlineExceeded(ApiError):
    """504: the request's deadline passed."""

    status = 504
    default_code = "deadline_exceeded"
