"""E05: what two hops could read differently is refused, or is one single request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from rig import CHAT, RawClient, chat, completion

BODY = json.dumps(chat()).encode()
SMUGGLED = b"GET /admin HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def request(*headers: bytes, body: bytes = BODY) -> bytes:
    lines = [b"POST " + CHAT.encode() + b" HTTP/1.1", b"Host: g"]
    lines += [b"Content-Type: application/json", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


CHUNKING = b"Transfer-Encoding: chunked"
LENGTH = b"Content-Length: %d" % len(BODY)
ODD = {
    "two lengths": request(b"Content-Length: 5", LENGTH),
    "two lengths, the right one first": request(LENGTH, b"Content-Length: 5"),
    "lengths in a list": request(b"Content-Length: %d, 5" % len(BODY)),
    "length and chunking": request(
        b"Content-Length: 4", b"Transfer-Encoding: chunked", body=CHUNKED
    ),
    "chunking and length": request(
        b"Transfer-Encoding: chunked", b"Content-Length: 4", body=CHUNKED
    ),
    "blank before the colon": request(b"Transfer-Encoding : chunked", body=CHUNKED),
    "unknown coding": request(b"Transfer-Encoding: xchunked", body=CHUNKED),
    "chunked is not last": request(b"Transfer-Encoding: chunked, gzip", body=CHUNKED),
    "line feed in an extension": request(
        b"Transfer-Encoding: chunked", body=b"%x;a\nb\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    ),
    "size that is no number": request(
        b"Transfer-Encoding: chunked", body=b"0x5\r\nhello\r\n0\r\n\r\n"
    ),
    "negative length": request(b"Content-Length: -1"),
    "length with a sign": request(b"Content-Length: +%d" % len(BODY)),
    "zero byte in a header": request(LENGTH, b"X-A: a\x00b"),
    "bare carriage return": request(LENGTH, b"X-A: a\rContent-Length: 0"),
    "folded header": request(LENGTH, b"X-A: a\r\n Content-Length: 0"),
    "header without a name": request(LENGTH, b": x"),
}


async def answers(url: str, data: bytes) -> list[bytes]:
    """Status lines of all answers to these bytes, until the gateway closes or is silent."""
    client = await RawClient.connect(url)
    client.writer.write(data)
    got = b""
    silence_s = 30.0
    try:
        while True:
            async with asyncio.timeout(silence_s):
                piece = await client.reader.read(65536)
            if not piece:
                break
            got, silence_s = got + piece, 0.3
    except (TimeoutError, ConnectionResetError):
        pass
    client.abort()
    return [line for line in got.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


@pytest.mark.parametrize("kind", ODD)
async def test_ambiguous_requests_are_refused_or_one(stub, serve, kind: str) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(completion())
    first, *more = await answers(served.url, ODD[kind] + SMUGGLED)
    assert len(worker.seen) <= 1
    if first.startswith(b"HTTP/1.1 400"):
        assert more == [], "the connection is closed"
        assert worker.seen == []
    else:
        assert first.startswith(b"HTTP/1.1 200")
        assert len(more) <= 1
        assert all(not line.startswith(b"HTTP/1.1 200") for line in more)
        check_framing(worker.seen[0])


@pytest.mark.parametrize(
    "data",
    [
        request(LENGTH),
        request(b"Transfer-Encoding: chunked", body=CHUNKED),
        request(b"transfer-encoding: Chunked", body=CHUNKED),
        request(LENGTH, LENGTH),
    ],
    ids=["length", "chunked", "capitals", "the same length twice"],
)
async def test_what_is_forwarded_has_one_framing(stub, serve, data: bytes) -> None:
    worker = await stub()
    served = await serve(worker)
    first, *_ = await answers(served.url, data)
    if b" 200" in first:
        check_framing(worker.seen[0])
        assert worker.seen[0].json["messages"] == chat()["messages"]
    else:
        assert b" 400" in first
        assert worker.seen == []


def check_framing(seen: Any) -> None:
    """One length, or chunked, never both."""
    framing = [*seen.values("content-length"), *seen.values("transfer-encoding")]
    assert len(framing) == 1
