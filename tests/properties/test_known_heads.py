"""Heads that were met before are read without the parser: whatever comes, the outcome is the same.

Each conversation is played twice, as it is and with the short cut switched off; what the handler
sees, what the client gets and whether the connection stays open must be equal, byte for byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

from depth import DEPTH
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.exchange import Answer
from gateway.upstream import UpstreamError
from gateway.wire import connection, limits
from gateway.wire.answers import Dates, WireClient
from gateway.wire.connection import Connection
from gateway.wire.request import ServerRequest
from gateway.wire.served import ServerConnection
from gateway.wire.server import WireServer
from shared.errors import ApiError

ODD = [
    *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b" ", b":", b"9", b"00", b"-", b"+1", b"\xff"),
    *(b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n"),
    *(b"Upgrade: x\r\nConnection: upgrade\r\n", b"Expect: 100-continue\r\n", b"X: y\r\n", b"0"),
    *(b"Date: Mon, 01 Jan 2024 00:00:00 GMT\r\n", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"),
]
HEADS = [
    b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\nX: y\r\n\r\n",
    b"POST /a HTTP/1.1\r\nHost: h\r\ncontent-length:%d\r\n\r\n",
    b"POST /early HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n",
    b"POST /a HTTP/1.1\r\nHost: h\r\nDate: Mon, 01 Jan 2024 00:00:00 GMT\r\n"
    b"Content-Length: %d\r\n\r\n",
    b"POST /a HTTP/1.0\r\nHost: h\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n",
]
LENGTHS = [b"+%d", b"-%d", b" %d", b"%d ", b"0%d", b"%d\r", b"%d\n", b"%d,", b"0x%d", b"%d;a"]
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nDate: Mon, 01 Jan 2024 00:00:00 GMT\r\nContent-Length: %d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ncontent-length: %d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n",
    b"HTTP/1.1 503 No\r\nContent-Length: %d\r\n\r\n",
]


def dated(message: bytes, second: int) -> bytes:
    return message.replace(b"00:00:00", b"00:00:%02d" % second)


@st.composite
def bodies(draw: st.DrawFn, heads: list[bytes]) -> bytes:
    """Some are what a head is too, to be slipped in."""
    inner = draw(st.sampled_from(heads))
    return draw(st.sampled_from([b"", b"hi", b"x" * 300, b"\r\n\r\n", inner % 2 + b"hi"]))


@st.composite
def messages(draw: st.DrawFn, heads: list[bytes]) -> list[bytes]:
    """One head that comes again and again, with others and injured ones among them."""
    head = draw(st.sampled_from(heads))
    made = [head % 2 + b"hi"]
    kinds = st.sampled_from(["same", "same", "other", "odd", "odd length"])
    for kind in draw(st.lists(kinds, min_size=1, max_size=5)):
        body = draw(bodies(heads))
        mold = draw(st.sampled_from(heads)) if kind == "other" else head
        one = dated(mold % len(body), draw(st.integers(0, 59))) + body
        if kind == "odd":
            at = draw(st.integers(0, len(mold)))
            one = one[:at] + draw(st.sampled_from(ODD)) + one[at + draw(st.integers(0, 3)) :]
        elif kind == "odd length":
            one = mold.replace(b"%d", draw(st.sampled_from(LENGTHS)) % len(body)) + body
        made.append(one)
    return made


@st.composite
def reads(draw: st.DrawFn, heads: list[bytes]) -> list[bytes]:
    """The messages as they come in: the first alone, others joined or cut, also inside of one."""
    first, *others = draw(messages(heads))
    data = b"".join(others)
    ends = list(accumulate(len(one) for one in others))
    inside = [at for at in range(1, len(data)) if data.startswith(b"POST", at)]
    joints = st.lists(st.sampled_from([*ends, *ends, *inside]) | st.integers(0, len(data)))
    cuts = ends if draw(st.booleans()) else draw(joints)
    return [first, *(data[a:b] for a, b in pairwise(sorted({0, len(data), *cuts})))]


class Wire(asyncio.Transport):
    """Keeps what is written; closed or cut, it tells so."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.ends: list[str] = []

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        self.sent += b"".join(list_of_data)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ends.append("eof")

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self.ends.append("abort")

    def close(self) -> None:
        self.ends.append("close")


class Still(Dates):
    def line(self) -> bytes:
        return b"Date: now\r\n"


def said(headers: Iterable[tuple[Any, Any]], *unread: Any) -> list[Any]:
    """The headers that somebody may read."""
    return sorted(pair for pair in headers if pair[0].lower() not in unread)


async def served(data: list[bytes]) -> tuple[list[Any], bytes, list[str], int]:
    """Requests as the handler saw them, and what became of the connection."""
    seen: list[Any] = []

    async def handle(request: ServerRequest, connection: ServerConnection) -> None:
        client = WireClient(request, connection)
        try:
            if request.path == "/early":
                await client.send(Answer(401, b"no"))
                return
            body = await request.body(200)
            told = (request.method, request.target, request.path, request.length, request.old)
            seen.append((*told, said(request.headers.items(), "content-length"), body))
            await client.send(Answer(200, body))
        except ApiError as error:
            await client.send(Answer(error.status, b""))

    server = WireServer(handle)
    server.dates = Still()
    wire, one = Wire(), server()
    one.connection_made(wire)
    shortened = 0
    for piece in data:
        one.data_received(piece)
        shortened += one._intake._strange == 0 and one._intake._known is not None
        for _ in range(8):
            await asyncio.sleep(0)
        if set(wire.ends) & {"close", "abort"}:
            break
    one.connection_lost(None)
    await server.shutdown(0.1)
    return seen, wire.sent, wire.ends, shortened


async def answered(data: list[bytes]) -> tuple[list[Any], int]:
    """What the caller of a worker reads, exchange by exchange."""
    told: list[Any] = []
    shortened = 0
    wire, one = Wire(), Connection(asyncio.get_running_loop())
    one.connection_made(wire)
    for piece in data:
        one.begin(b"", b"", 60.0)
        half = len(piece) // 2 if len(piece) > 350 else len(piece)
        one.data_received(piece[:half])
        told.append((one.has_head, one.complete))
        if half < len(piece) and not one.lost:
            one.data_received(piece[half:])
        one.connection_lost(None) if wire.ends else one.eof_received()
        shortened += one._strange == 0 and one._met is not None
        body: Any = b""
        try:
            if one.has_head:
                while not one.complete or one._pieces:
                    if not one._pieces and one._error is None:
                        body += b"..."
                        break
                    body += await one.read()
            elif one._error is not None:
                raise one._error
        except UpstreamError as error:
            body = type(error)
        told.append(
            (
                one.status,
                one.has_head,
                one.complete,
                said(one.headers, b"date", b"content-length"),
                body,
            )
        )
        if not one.end():
            told.append("not kept")
            break
    return told, shortened


A, DATED, EARLY = HEADS[0] % 2 + b"hi", HEADS[3] % 2 + b"hi", HEADS[2]
UPGRADE = EARLY.replace(b"Host: h", b"Host: h\r\nUpgrade: x\r\nConnection: upgrade")


@settings(max_examples=200 * DEPTH, deadline=None)
@given(reads(HEADS))
@example([A, DATED + A, DATED])  # the head before and the request behind are not one
@example([A, EARLY % len(A), A, A])  # answered already, and this is its body
@example([A, UPGRADE % len(A), A, A])
@example([A, HEADS[1] % len(A), A, A])
@example([A, HEADS[0] % 4, b"h", b"i", b"hi" + A, A + A])
def test_requests_with_known_heads_are_read_as_by_the_parser(data: list[bytes]) -> None:
    usual = limits.STRANGE_HEADS
    *short, _ = asyncio.run(served(data))
    try:
        limits.STRANGE_HEADS = 0
        *parsed, shortened = asyncio.run(served(data))
    finally:
        limits.STRANGE_HEADS = usual
    assert not shortened
    assert short == parsed


@settings(max_examples=200 * DEPTH, deadline=None)
@given(messages(ANSWERS))
def test_answers_with_known_heads_are_read_as_by_the_parser(data: list[bytes]) -> None:
    usual = connection.STRANGE_HEADS
    short, _ = asyncio.run(answered(data))
    try:
        connection.STRANGE_HEADS = 0
        parsed, shortened = asyncio.run(answered(data))
    finally:
        connection.STRANGE_HEADS = usual
    assert not shortened
    assert short == parsed


async def test_a_second_head_is_not_parsed() -> None:
    one = HEADS[0] % 2 + b"hi"
    *_, shortened = await served([one, one, HEADS[0] % 3 + b"hi", b"!", one + one])
    assert shortened == 4
    _, shortened = await answered([ANSWERS[0] % 2 + b"hi", ANSWERS[0] % 400 + bytes(400)] * 2)
    assert shortened == 3
