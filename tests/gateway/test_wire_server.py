"""The public listener's server, by the byte: framing, order, limits, what it must not accept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.exchange import Answer
from gateway.wire import limits
from gateway.wire.answers import WireClient
from gateway.wire.request import ServerRequest
from gateway.wire.served import ServerConnection
from gateway.wire.server import WireServer
from shared.errors import ApiError

POST = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi"
GET = b"GET /b?q=1 HTTP/1.1\r\nHost: h\r\n\r\n"


class Echo:
    """Answers with method, target and body; ``/stream`` in chunks, ``/early`` without reading."""

    def __init__(self) -> None:
        self.server = WireServer(self.handle)
        self.seen: list[tuple[str, str, bytes]] = []
        self.waits, self.gone = asyncio.Event(), asyncio.Event()
        self.wrote = 0

    async def handle(self, request: ServerRequest, connection: ServerConnection) -> None:
        client = WireClient(request, connection, b"x-extra: 1\r\n")
        try:
            if request.path == "/early":
                await client.send(Answer(401, b"no"))
                return
            if request.path == "/wait":
                self.waits.set()
                await asyncio.sleep(3600)
            body = await request.body(100_000)
            self.seen.append((request.method, request.target, body))
            if request.path == "/header":
                await client.send(Answer(200, repr(request.headers.get("X-Told")).encode()))
            elif request.path == "/stream":
                await client.start(200, [])
                for byte in body:
                    await client.write(bytes([byte]))
                await client.finish()
            elif request.path == "/large":
                await client.send(Answer(200, bytes(16 << 20)))
            elif request.path == "/flood":
                await client.start(200, [])
                while True:
                    await client.write(bytes(65_536))
                    self.wrote += 65_536
            else:
                await client.send(Answer(200, b"%b %b" % (request.target.encode(), body)))
        except ApiError as error:
            client.close = error.status in (408, 413)
            await client.send(Answer(error.status, error.message.encode()))
        except asyncio.CancelledError:
            self.gone.set()
            raise


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, int]]:
    made = Echo()
    listener = await made.server.listen("127.0.0.1", 0)
    yield made, listener.sockets[0].getsockname()[1]
    listener.close()
    await made.server.shutdown(0.1)


async def talk(port: int, *pieces: bytes, pause: float = 0.0, end: bool = True) -> bytes:
    """Send, and read until the server closes (or until it is silent for a while)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(pause)
    got = b""
    try:
        while True:
            async with asyncio.timeout(30.0 if end or not got else 0.4):
                piece = await reader.read(65_536)
            if not piece:
                break
            got += piece
    except (TimeoutError, ConnectionError):
        got += b"" if not end else b"<never closed>"
    writer.close()
    return got


CLOSE = b"GET /last HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


async def test_requests_of_one_connection_are_answered_in_order(echo: tuple[Echo, int]) -> None:
    server, port = echo
    for pieces in ([POST, GET, POST, CLOSE], [POST + GET + POST + CLOSE]):
        got = await talk(port, *pieces, pause=0.01)
        bodies = [part.split(b"\r\n\r\n")[1] for part in got.split(b"HTTP/1.1 200 OK\r\n")[1:]]
        assert bodies == [b"/a hi", b"/b?q=1 ", b"/a hi", b"/last "]
        assert got.count(b"Connection: close") == 1
    assert len(server.seen) == 8


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), max_size=12), st.booleans())
def test_any_chunking_gives_the_same_answers(cuts: list[int], chunked: bool) -> None:
    one = POST
    if chunked:
        one = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        one += b"1;x=y\r\nh\r\n1\r\ni\r\n0\r\nX-Trailer: 1\r\n\r\n"
    data = one + GET + one + CLOSE

    async def run() -> list[tuple[str, str, bytes]]:
        made = Echo()
        listener = await made.server.listen("127.0.0.1", 0)
        edges = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
        pieces = [data[a:b] for a, b in pairwise(edges) if a < b]
        await talk(listener.sockets[0].getsockname()[1], *pieces)
        listener.close()
        await made.server.shutdown(0.1)
        return made.seen

    want = [("POST", "/a", b"hi"), ("GET", "/b?q=1", b""), ("POST", "/a", b"hi")]
    assert asyncio.run(run()) == [*want, ("GET", "/last", b"")]


REFUSED = {
    "no HTTP": b"hello\r\n\r\n",
    "no host": b"GET /a HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two lengths": b"POST /a HTTP/1.1\r\nHost: h\r\n"
    b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi",
    "length and chunks": b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks not last": b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, gzip\r\n\r\n",
    "odd chunks": b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: xchunked\r\n\r\nhi",
    "signed length": b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: +2\r\n\r\nhi",
    "listed length": b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2, 2\r\n\r\nhi",
    "folded header": b"GET /a HTTP/1.1\r\nHost: h\r\nX-A: 1\r\n two\r\n\r\n",
    "space before colon": b"GET /a HTTP/1.1\r\nHost: h\r\nX-A : 1\r\n\r\n",
    "zero byte": b"GET /a HTTP/1.1\r\nHost: h\r\nX-A: \0\r\n\r\n",
    "another version": b"GET /a HTTP/3.7\r\nHost: h\r\n\r\n",
    "second is none": GET + b"\x16\x03\x01 what\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_could_be_read_in_two_ways_is_refused(echo: tuple[Echo, int], name: str) -> None:
    server, port = echo
    got = await talk(port, REFUSED[name])
    if name == "second is none":
        assert got.startswith(b"HTTP/1.1 200 OK")
    else:
        assert got.startswith(b"HTTP/1.1 400 Bad Request"), got
        assert b"Connection: close" in got
        assert not server.seen
    assert b"never closed" not in got


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.binary(max_size=60)
        | st.sampled_from(
            [POST, GET, b"\r\n", b"Host: h\r\n", b"0\r\n\r\n", b"POST / HTTP/1.1\r\n"]
        ),
        max_size=8,
    )
)
def test_whatever_comes_the_server_lives(parts: list[bytes]) -> None:
    async def run() -> None:
        failures: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what))
        made = Echo()
        listener = await made.server.listen("127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(OSError):  # it may have closed already
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0)
            writer.write_eof()
            async with asyncio.timeout(30):
                while await reader.read(65_536):
                    pass
        writer.close()
        assert b"200 OK" in await talk(port, CLOSE)
        listener.close()
        await made.server.shutdown(0.1)
        assert not made.server.connections
        assert not failures

    asyncio.run(run())


async def test_old_clients(echo: tuple[Echo, int]) -> None:
    _, port = echo
    got = await talk(port, b"GET /a HTTP/1.0\r\n\r\n")
    assert got.endswith(b"\r\n\r\n/a ")
    got = await talk(port, b"POST /stream HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc")
    assert b"chunked" not in got
    assert got.endswith(b"\r\n\r\nabc")
    got = await talk(port, b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", end=False)
    assert b"Connection: keep-alive" in got


async def test_a_stream_is_chunked(echo: tuple[Echo, int]) -> None:
    _, port = echo
    ask = b"POST /stream HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab"
    got = await talk(port, ask, CLOSE)
    assert b"\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\nHTTP/1.1 200 OK" in got


async def test_the_absolute_form_and_other_protocols(echo: tuple[Echo, int]) -> None:
    server, port = echo
    await talk(port, b"GET http://x.y/p?q HTTP/1.1\r\nHost: x.y\r\nConnection: close\r\n\r\n")
    upgrade = b"POST /u HTTP/1.1\r\nHost: h\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n"
    got = await talk(port, upgrade + b"Content-Length: 2\r\n\r\nhi")
    assert b"200 OK" in got
    assert server.seen == [("GET", "/p?q", b""), ("POST", "/u", b"hi")]


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ("http://x.y", "/"),
        ("HTTP://x.y:80/", "/"),
        ("http://x.y?u=/b", "/?u=/b"),
        ("http://x.y?u=http://z/b", "/?u=http://z/b"),
        ("http://x.y//b", "//b"),
        ("http://x.y/a?u=http://z/b", "/a?u=http://z/b"),
    ],
)
async def test_nothing_but_the_path_of_the_absolute_form_becomes_the_path(
    echo: tuple[Echo, int], sent: str, seen: str
) -> None:
    server, port = echo
    await talk(port, f"GET {sent} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
    assert [target for _, target, _ in server.seen] == [seen]


@pytest.mark.parametrize("where", ["target", "one header", "many headers", "no end"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_head_beyond_the_limit_is_431_however_it_comes(
    echo: tuple[Echo, int], where: str, at_once: bool
) -> None:
    server, port = echo
    many = limits.MAX_HEAD_BYTES + 1
    target = "/" + "t" * many if where == "target" else "/"
    headers = f"X-Long: {'v' * many}\r\n" if where == "one header" else ""
    if where == "many headers":
        headers = "".join(f"X-{number:06}: {'v' * 24}\r\n" for number in range(many // 32 + 1))
    head = f"GET {target} HTTP/1.1\r\nHost: h\r\n{headers}\r\n".encode()
    if where == "no end":
        head = b"GET / HTTP/1.1\r\nHost: h\r\nX-A: " + b"x" * 200_000
    pieces = [head] if at_once else [head[at : at + 5000] for at in range(0, len(head), 5000)]
    got = await talk(port, *pieces, pause=0.0 if at_once else 0.002)
    assert got.startswith(b"HTTP/1.1 431 ")
    assert b'"type":"invalid_request_error"' in got
    assert b"never closed" not in got
    assert server.seen == []


@pytest.mark.parametrize(
    "begin",
    [b"3;", b"3;a=", b"", b"3\r\nabc\r\n0\r\nX: ", b"3\r\nabc\r\n0\r\n"],
    ids=["extension", "its value", "size", "trailer", "its name"],
)
async def test_what_stands_around_a_body_is_limited_as_a_head_is(
    echo: tuple[Echo, int], begin: bytes
) -> None:
    server, port = echo
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    endless = [b"0" * 8192] * (2 * limits.MAX_HEAD_BYTES // 8192)
    got = await talk(port, head + begin, *endless, pause=0.002)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert b"never closed" not in got
    assert server.seen == []


async def test_many_trailers_are_limited_too(echo: tuple[Echo, int]) -> None:
    server, port = echo
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    few = [b"X: y\r\n" * 1000] * 5
    got = await talk(port, head, *few, b"\r\n", CLOSE, pause=0.002)
    assert got.count(b"HTTP/1.1 200 ") == 2
    got = await talk(port, head, *few * 4, b"\r\n", CLOSE, pause=0.002)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert len(server.seen) == 2


async def test_many_small_chunks_are_no_large_head(echo: tuple[Echo, int]) -> None:
    server, port = echo
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    small = b"1;ext=value\r\nx\r\n" * 500
    got = await talk(port, head, *[small] * 40, b"0\r\n\r\n", CLOSE, pause=0.001)
    assert got.count(b"HTTP/1.1 200 ") == 2
    assert server.seen[0][2] == b"x" * 20_000


@pytest.mark.parametrize("rest", [b"zz\r\n", b"0\r\nno trailer\r\n\r\n", b"0" * 70_000])
async def test_one_request_gets_one_answer(echo: tuple[Echo, int], rest: bytes) -> None:
    _, port = echo
    head = b"POST /early HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    got = await talk(port, head, rest, GET, pause=0.05, end=False)
    assert got.startswith(b"HTTP/1.1 401 ")
    assert got.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("version", ["HTTP/0.9", "HTTP/2.0", "HTTP/1.9", "HTTP/3", "", "http/1.1"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_other_versions_are_no_http(
    echo: tuple[Echo, int], method: str, version: str
) -> None:
    server, port = echo
    line = f"{method} /a {version}".rstrip()
    got = await talk(port, f"{line}\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi".encode(), GET)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert got.count(b"HTTP/1.1") == 1
    assert server.seen == []


async def test_head_gets_no_body(echo: tuple[Echo, int]) -> None:
    _, port = echo
    got = await talk(port, b"HEAD /a HTTP/1.1\r\nHost: h\r\n\r\n", CLOSE)
    first = got.split(b"HTTP/1.1 200 OK")[1]
    assert b"Content-Length: 3" in first
    assert first.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("blanks", ["", " ", "\t", " \t ", " " * 300])
async def test_blanks_around_a_value_are_no_part_of_it(echo: tuple[Echo, int], blanks: str) -> None:
    _, port = echo
    told = f"GET /header HTTP/1.1\r\nHost: h\r\nX-Told:{blanks}a b{blanks}\r\n\r\n"
    assert b"\r\n\r\n'a b'HTTP" in await talk(port, told.encode(), CLOSE)
    ask = f"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue{blanks}\r\n"
    got = await talk(port, f"{ask}\r\n".encode(), b"hi", CLOSE, pause=0.05)
    assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


async def test_a_body_is_asked_for_where_the_client_waits(echo: tuple[Echo, int]) -> None:
    _, port = echo
    ask = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    got = await talk(port, ask, b"hi", CLOSE, pause=0.05)
    assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    refused = await talk(port, ask.replace(b"/a", b"/early"))
    assert refused.startswith(b"HTTP/1.1 401")
    assert b"Connection: close" in refused  # whether the body will come nobody can know


async def test_an_early_answer_leaves_the_connection_usable(echo: tuple[Echo, int]) -> None:
    server, port = echo
    ask = b"POST /early HTTP/1.1\r\nHost: h\r\nContent-Length: 300000\r\n\r\n"
    got = await talk(port, ask, b"x" * 150_000, b"x" * 150_000, CLOSE, pause=0.05)
    assert got.startswith(b"HTTP/1.1 401")
    assert b"200 OK" in got
    assert server.seen == [("GET", "/last", b"")]


@pytest.mark.parametrize("announced", [True, False])
async def test_bodies_beyond_the_limit(echo: tuple[Echo, int], announced: bool) -> None:
    _, port = echo
    if announced:
        pieces = [b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 200000\r\n\r\n", b"x" * 200_000]
    else:
        head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        pieces = [head, *[b"8000\r\n" + b"x" * 0x8000 + b"\r\n"] * 6, b"0\r\n\r\n"]
    got = await talk(port, *pieces, pause=0.01)
    assert got.startswith(b"HTTP/1.1 413")
    assert b"never closed" not in got


async def test_slow_clients(echo: tuple[Echo, int], monkeypatch: pytest.MonkeyPatch) -> None:
    _, port = echo
    monkeypatch.setattr(limits, "HEAD_S", 0.3)
    monkeypatch.setattr(limits, "BODY_S", 0.3)
    assert await talk(port) == b""
    assert await talk(port, b"GET /a HT") == b""
    assert (await talk(port, POST[:-1])).startswith(b"HTTP/1.1 408")
    assert (await talk(port, GET)).startswith(b"HTTP/1.1 200")  # idle after it: closed


async def test_a_client_that_leaves_ends_its_handler(echo: tuple[Echo, int]) -> None:
    server, port = echo
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET.replace(b"/b", b"/wait"))
    async with asyncio.timeout(30):
        await server.waits.wait()
        writer.close()
        await server.gone.wait()


async def test_a_client_that_reads_nothing_holds_little(echo: tuple[Echo, int]) -> None:
    server, port = echo
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(GET.replace(b"/b", b"/flood"))
    await reader.read(10)
    before = -1
    while server.wrote != before:  # until the system's buffers are full
        before = server.wrote
        assert before < 32 << 20
        await asyncio.sleep(0.2)
    writer.close()
    async with asyncio.timeout(30):
        await server.gone.wait()


STALLED = {
    "in a stream": GET.replace(b"/b", b"/flood"),
    "after a whole answer": GET.replace(b"/b", b"/large"),
    "after the last answer": CLOSE.replace(b"/last", b"/large"),
    "of an old client": b"GET /large HTTP/1.0\r\n\r\n",
    "refused after an answer": GET.replace(b"/b", b"/large") + b"no HTTP\r\n\r\n",
    "with an unread body": b"POST /large HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n123456789",
    "with too many in line": GET.replace(b"/b", b"/large") * 40,
}  # fmt: skip


@pytest.mark.parametrize("how", STALLED)
async def test_a_client_that_takes_in_nothing_is_cut(
    echo: tuple[Echo, int], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    for name in ("STALL_S", "HEAD_S", "LINGER_S"):
        monkeypatch.setattr(limits, name, 0.2)
    server, port = echo
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(STALLED[how])
    await reader.read(10)
    assert server.server.connections
    async with asyncio.timeout(60):
        while server.server.connections:  # noqa: ASYNC110 - a plain set
            await asyncio.sleep(0.02)
    writer.transport.abort()


async def test_a_slow_client_that_takes_in_something_is_not_cut(
    echo: tuple[Echo, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STALL_S", "HEAD_S"):
        monkeypatch.setattr(limits, name, 1.0)
    _, port = echo
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 18)
    writer.write(STALLED["after the last answer"])
    got = 0
    while piece := await reader.read(1 << 20):
        got += len(piece)
        await asyncio.sleep(0.02)
    assert got > 16 << 20
    writer.close()


@pytest.mark.parametrize("sort", ["GET", "POST", "chunks"])
async def test_however_many_requests_are_in_line_each_is_answered_and_few_are_read_ahead(
    echo: tuple[Echo, int], sort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, port = echo
    longest = 0
    begin = ServerConnection._begin

    def watched(self: ServerConnection) -> None:
        nonlocal longest
        longest = max(longest, len(self._line))
        begin(self)

    monkeypatch.setattr(ServerConnection, "_begin", watched)
    chunks = (
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    )
    one = {"GET": GET, "POST": POST, "chunks": chunks}[sort]
    got = await talk(port, one * 2000 + CLOSE)
    assert b"never closed" not in got
    assert got.count(b"HTTP/1.1 200 OK") == len(server.seen) == 2001
    assert server.seen[-1][1] == "/last"
    shortest = len(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    assert longest <= limits.MAX_PIPELINED + limits.SLICE_BYTES // shortest


async def test_what_is_in_line_behind_what_is_no_request_is_answered_no_more(
    echo: tuple[Echo, int],
) -> None:
    server, port = echo
    got = await talk(port, GET * 100 + b"no HTTP\r\n\r\n" + GET * 100)
    assert b"never closed" not in got
    assert 1 <= len(server.seen) <= 100


async def test_answers_to_a_client_that_reads_none_do_not_pile_up(echo: tuple[Echo, int]) -> None:
    server, port = echo
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(GET.replace(b"/b", b"/large") * 40)
    await reader.read(10)
    await asyncio.sleep(0.3)
    assert len(server.seen) <= 2
    writer.transport.abort()


CODINGS = {
    "gzip, chunked": 501,
    "deflate , chunked": 501,
    "identity, chunked": 501,
    ", chunked": 501,
    "chunked;q=1, chunked": 501,
    "chunked, chunked": 400,
    "chunked": 200,
    " Chunked": 200,
    "gzip\r\nTransfer-Encoding: chunked": 501,
    "chunked\r\nTransfer-Encoding: chunked": 400,
    "gzip": 400,
    "chunked, gzip": 400,
}


@pytest.mark.parametrize("coding", CODINGS)
async def test_of_transfer_codings_only_chunked_is_understood(
    echo: tuple[Echo, int], coding: str
) -> None:
    """RFC 9112, 6.1: 501 for what is not understood; never coded bytes taken for plain ones."""
    server, port = echo
    head = f"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: {coding}\r\n\r\n".encode()
    got = await talk(port, head + b"2\r\nhi\r\n0\r\n\r\n", end=CODINGS[coding] != 200)
    assert got.startswith(b"HTTP/1.1 %d " % CODINGS[coding])
    assert b"never closed" not in got
    assert server.seen == ([("POST", "/a", b"hi")] if CODINGS[coding] == 200 else [])
    if CODINGS[coding] != 200:
        assert b"Connection: close" in got


async def test_an_old_client_cannot_chunk(echo: tuple[Echo, int]) -> None:
    server, port = echo
    head = b"POST /a HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert (await talk(port, head + b"2\r\nhi\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert server.seen == []


async def test_shutdown_waits_a_little_for_those_at_work(echo: tuple[Echo, int]) -> None:
    server, port = echo
    idle = asyncio.create_task(talk(port, GET))
    busy = asyncio.create_task(talk(port, GET.replace(b"/b", b"/wait")))
    async with asyncio.timeout(30):
        await server.waits.wait()
        while not server.seen:  # noqa: ASYNC110 - a plain list
            await asyncio.sleep(0.01)
    await server.server.shutdown(0.2)
    assert b"200 OK" in await idle
    assert await busy in (b"", b"<never closed>")
    assert not server.server.connections
