"""What the head of a request says: target, framing, host. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import httptools

from gateway.wire.request import ServerRequest
from shared.errors import NotImplementedHere

_CODING = NotImplementedHere("Of transfer codings only 'chunked' is understood.")
_AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
"""What comes before the path in the absolute form."""


def read_head(request: ServerRequest, parser: httptools.HttpRequestParser) -> None:
    """Fill in what follows from the head. Raises ``HttpParserError`` for what is ambiguous, and
    :class:`NotImplementedHere` for a transfer coding besides ``chunked`` (RFC 9112, 6.1)."""
    headers = request.headers
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise httptools.HttpParserError("no version that is framed as this is read")
    request.old = version == "1.0"
    if "Transfer-Encoding" in headers:
        check_codings(headers.getall("Transfer-Encoding"), old=request.old)
    hosts = headers.getall("Host", ())
    if len(hosts) != 1 and not (request.old and not hosts):
        raise httptools.HttpParserError("a request names one host")
    request.method = parser.get_method().decode("ascii")
    request.keep_alive = parser.should_keep_alive()
    target = request.target
    if not target.startswith("/"):  # the absolute form, as proxies send it
        rest = _AUTHORITY.sub("", target, count=1)
        target = target if rest == target else rest if rest.startswith("/") else f"/{rest}"
        request.target = target
    request.path = target.partition("?")[0].partition("#")[0]
    length = headers.get("Content-Length")
    request.length = int(length) if length is not None else None
    request.expects = headers.get("Expect", "").lower() == "100-continue"


def check_codings(fields: Sequence[str], *, old: bool) -> None:
    """``chunked`` once and nothing else; llhttp looks at the last one only.

    Raises :class:`NotImplementedHere`, and ``HttpParserError`` where the framing is faulty.
    """
    codings = [one.strip().lower() for one in ",".join(fields).split(",")]
    if old or codings[-1] != "chunked" or codings.count("chunked") > 1:
        raise httptools.HttpParserError("a body is chunked once, last, and not before HTTP/1.1")
    if codings != ["chunked"]:
        raise _CODING
