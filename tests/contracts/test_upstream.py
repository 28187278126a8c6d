"""What every client towards workers must do, whatever it is made of: scripted raw servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
from chunkkit import Takes
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.upstream import (
    Timeouts,
    Upstream,
    UpstreamBroken,
    UpstreamConnectError,
    UpstreamError,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.upstream_aiohttp import AiohttpUpstream
from gateway.wire.client import WireUpstream

CLIENTS: dict[str, Callable[[], Upstream]] = {"httptools": WireUpstream, "aiohttp": AiohttpUpstream}
LIMITS = Timeouts(connect_s=5.0, idle_s=30.0)
JSON = [("Content-Type", "application/json")]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Play = Callable[["Server", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Plays one script on each connection and keeps what it was sent."""

    def __init__(self, play: Play) -> None:
        self.play, self.requests, self.connections = play, list[bytes](), 0
        self.left, self.tasks = asyncio.Event(), set[asyncio.Task[None]]()

    async def __aenter__(self) -> Server:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # for the transports to see that they are closed

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self.play(self, reader, writer)
        finally:
            writer.close()

    async def read(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        whole = head + await reader.readexactly(length)
        self.requests.append(whole)
        return whole


def says(*pieces: bytes, times: int = 100, pause: float = 0.0, stay: bool = True) -> Play:
    """Answer each of ``times`` requests with ``pieces``, then close."""

    async def play(
        server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        for _ in range(times):
            await server.read(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            if not stay:
                return
        await reader.read()

    return play


@pytest.fixture(params=sorted(CLIENTS))
async def client(request: pytest.FixtureRequest) -> AsyncIterator[Upstream]:
    made = CLIENTS[request.param]()
    yield made
    await made.close()


async def call(
    client: Upstream, url: str, body: bytes = b"{}", limits: Timeouts = LIMITS, path: str = "/v1/x"
) -> tuple[int, list[tuple[str, str]], bytes]:
    async with client.open(url, path, JSON, body, timeouts=limits) as response:
        pieces = []
        while piece := await response.read():
            pieces.append(piece)
        return response.status, list(response.headers), b"".join(pieces)


EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = {
    "length": [OK],
    "byte by byte": [bytes([one]) for one in OK],
    "chunks": [CHUNKED, b"1\r\no\r\n", b"1\r\nk\r\n", b"0\r\n\r\n"],
    "chunks cut oddly": [
        CHUNKED[:-1],
        CHUNKED[-1:] + b"1",
        b"\r",
        b"\no\r\n1\r\nk",
        b"\r\n0\r\n\r\n",
    ],
    "chunk extensions": [CHUNKED, b"2;a=b\r\nok\r\n0\r\n\r\n"],
    "trailers": [CHUNKED, b"2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n"],
    "continue first": [b"HTTP/1.1 100 Continue\r\n\r\n", OK],
    "no reason": [OK.replace(b" OK", b" ")],
    "spaces": [b"HTTP/1.1 200 OK\r\nContent-Length:   2  \r\n\r\nok"],
}


@pytest.mark.parametrize("name", WHOLE)
async def test_whole_answers_keep_the_connection(client: Upstream, name: str) -> None:
    async with Server(says(*WHOLE[name], pause=0.001)) as server:
        for _ in range(3):
            status, headers, body = await call(client, server.url)
            assert (status, body) == (200, b"ok")
            assert not {"x-sum", "transfer-encoding", "content-length"} & {
                key.lower() for key, _ in headers
            }
        assert (server.connections, len(server.requests)) == (1, 3)


async def test_an_answer_without_framing_ends_with_the_connection(client: Upstream) -> None:
    async with Server(says(b"HTTP/1.0 200 OK\r\n\r\n", b"o", b"k", stay=False)) as server:
        assert (await call(client, server.url))[2] == b"ok"
        assert (await call(client, server.url))[2] == b"ok"
        assert server.connections == 2


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body(client: Upstream, status: int) -> None:
    async with Server(says(b"HTTP/1.1 %d X\r\n\r\n" % status)) as server:
        assert (await call(client, server.url))[::2] == (status, b"")
        assert (await call(client, server.url))[::2] == (status, b"")


BROKEN = {
    "nothing": [],
    "no HTTP": [b"hello there\r\n\r\n"],
    "half a head": [b"HTTP/1.1 200 OK\r\nContent-Le"],
    "too short": [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"],
    "no last chunk": [CHUNKED, b"2\r\nok\r\n"],
    "half a chunk": [CHUNKED, b"5\r\nok"],
    "a bad chunk size": [CHUNKED, b"2\r\nok\r\nzz\r\n"],
    "two lengths": [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok"],
    "a negative length": [b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok"],
    "another coding": [CHUNKED.replace(b"chunked", b"gzip, chunked"), b"2\r\nok\r\n0\r\n\r\n"],
    "another protocol": [b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nxxxx"],
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_answers_break_the_call_and_the_connection(
    client: Upstream, name: str
) -> None:
    async with Server(says(*BROKEN[name], stay=False)) as server:
        for before in range(2):
            async with asyncio.timeout(60):
                if name == "another protocol":  # either way it is no success
                    with suppress(UpstreamError):
                        assert (await call(client, server.url))[0] == 101
                else:
                    with pytest.raises(UpstreamBroken):
                        await call(client, server.url)
            assert server.connections == before + 1


async def test_bytes_before_the_break_are_not_lost(client: Upstream) -> None:
    async with (
        Server(says(CHUNKED, b"5\r\nfirst\r\n", pause=0.05, stay=False)) as server,
        client.open(server.url, "/", JSON, b"{}", timeouts=LIMITS) as response,
    ):
        assert await response.read() == b"first"
        with pytest.raises(UpstreamBroken):
            await response.read()


@pytest.mark.parametrize("pieces", [[OK], [CHUNKED, b"2\r\nok\r\n", b"0\r\n\r\n"], [EMPTY]])
async def test_the_rest_is_all_of_it_or_must_be_read(client: Upstream, pieces: list[bytes]) -> None:
    async with Server(says(*pieces, pause=0.02)) as server:
        for _ in range(3):
            async with client.open(server.url, "/", JSON, b"{}", timeouts=LIMITS) as response:
                body = response.rest()
                if body is None:
                    body = b""
                    while more := await response.read():
                        body += more
                assert body == (b"" if pieces == [EMPTY] else b"ok")
                assert await response.read() == b""
                assert not response.rest()
        assert server.connections == 1


async def test_of_a_broken_answer_there_is_no_rest(client: Upstream) -> None:
    async with (
        Server(says(CHUNKED, b"5\r\nfirst\r\n", stay=False)) as server,
        client.open(server.url, "/", JSON, b"{}", timeouts=LIMITS) as response,
    ):
        await asyncio.sleep(0.1)
        assert response.rest() is None


async def test_a_kept_connection_that_was_closed_is_not_used(client: Upstream) -> None:
    async with Server(says(OK, times=1, stay=False)) as server:
        for _ in range(20):
            assert (await call(client, server.url))[2] == b"ok"
        assert len(server.requests) == 20


async def test_closed_just_as_it_is_used_again_is_sent_once_more(client: Upstream) -> None:
    async def play(
        server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await server.read(reader)
        writer.write(OK)
        await reader.read(1)  # the next request comes, and the connection goes

    async with Server(play) as server:
        for _ in range(10):
            assert (await call(client, server.url))[2] == b"ok"
        assert server.connections == 10


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", b"junk"])
async def test_what_nobody_asked_for_is_nobodys_answer(client: Upstream, more: bytes) -> None:
    async with Server(says(OK + more, times=1)) as server:
        for _ in range(4):
            with suppress(UpstreamError):
                assert (await call(client, server.url))[2] == b"ok"
            await asyncio.sleep(0.01)
        assert server.connections == 4


@pytest.mark.parametrize(
    "late",
    [
        b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbye",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
        b"HTTP/1.1 200 OK\r\n",
        b"junk",
    ],
)
async def test_what_comes_on_an_idle_connection_is_nobodys_answer(
    client: Upstream, late: bytes
) -> None:
    """Some proxies say 408 on a connection that was idle for too long."""

    async def play(
        server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await server.read(reader)
        writer.write(OK)
        await is_idle.wait()
        writer.write(late)
        said.set()
        await reader.read(1)

    is_idle, said = asyncio.Event(), asyncio.Event()
    async with Server(play) as server:
        for n in range(4):
            assert await call(client, server.url) == (200, [], b"ok")
            is_idle.set()
            await said.wait()
            for _ in range(5):  # what lies in a socket is read within one turn of the loop
                await asyncio.sleep(0)
            is_idle.clear()
            said.clear()
            assert server.connections == n + 1


async def test_nobody_listens(client: Upstream) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(UpstreamConnectError):
            await call(client, f"http://127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize(
    "sent", [[], [b"HTTP/1.1 200 OK\r\n"], [CHUNKED], [CHUNKED, b"2\r\nok\r\n"]]
)
async def test_silence(client: Upstream, sent: list[bytes]) -> None:
    async with Server(says(*sent)) as server:
        with pytest.raises(UpstreamTimeout):
            await call(client, server.url, limits=Timeouts(5.0, 0.2))


async def test_the_limit_is_for_silence_not_for_the_whole(client: Upstream) -> None:
    pieces = [CHUNKED, *([b"1\r\nx\r\n"] * 12), b"0\r\n\r\n"]
    async with Server(says(*pieces, pause=0.1)) as server:
        assert (await call(client, server.url, limits=Timeouts(5.0, 1.0)))[2] == b"x" * 12
        # A shorter limit holds at once on the connection that was kept.
        with pytest.raises(UpstreamTimeout):
            await call(client, server.url, limits=Timeouts(5.0, 0.02))


@pytest.mark.parametrize("refused", [b"2", b"never"])
async def test_what_is_taken_on_the_way_is_not_read_again(client: Upstream, refused: bytes) -> None:
    async def play(
        server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await server.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for n in range(5):
            await asyncio.sleep(0.02)
            writer.write(b"1\r\n%d\r\n" % n)
        await asyncio.sleep(0.02)
        writer.write(b"0\r\n\r\n")

    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        if data != refused:
            taken.append(data)
        return data != refused

    async with (
        Server(play) as server,
        client.open(server.url, "/", JSON, b"{}", timeouts=LIMITS) as response,
    ):
        while piece := await response.pass_on(Takes(take)):
            assert piece == refused
            taken.append(b"<" + piece + b">")
    shown = b"".join(taken)
    assert shown == b"01234".replace(refused, b"<" + refused + b">")


async def test_silence_behind_taken_bytes_is_noticed(client: Upstream) -> None:
    async def play(
        server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await server.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(15):
            await asyncio.sleep(0.1)
            writer.write(b"1\r\nx\r\n")
        await reader.read()

    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return True

    async with (
        Server(play) as server,
        client.open(server.url, "/", JSON, b"{}", timeouts=Timeouts(5.0, 1.0)) as response,
    ):
        with pytest.raises(UpstreamTimeout):
            await response.pass_on(Takes(take))
    assert b"".join(taken) == b"x" * 15


async def test_a_slow_reader_is_no_silence_and_holds_the_worker_back(client: Upstream) -> None:
    sent = 0

    async def play(
        server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal sent
        await server.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64 * 16):
            writer.write(bytes(65_536))
            await writer.drain()
            sent += 65_536

    async with (
        Server(play) as server,
        client.open(server.url, "/", JSON, b"{}", timeouts=Timeouts(5.0, 0.3)) as response,
    ):
        got = len(await response.read())
        await asyncio.sleep(0.8)
        assert sent < 32 << 20  # what the system's buffers hold, and little more
        while piece := await response.read():
            got += len(piece)
        assert got == 64 << 20


async def test_leaving_early_closes_the_connection(client: Upstream) -> None:
    async def play(
        server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await server.read(reader)
        writer.write(CHUNKED + b"2\r\nok\r\n")
        assert await reader.read() == b""
        server.left.set()

    async with Server(play) as server:
        async with client.open(server.url, "/", JSON, b"{}", timeouts=LIMITS) as response:
            assert await response.read() == b"ok"
        async with asyncio.timeout(60):
            await server.left.wait()


@pytest.mark.parametrize(("rest", "kept"), [(b"0\r\n\r\n", True), (b"", False)])
async def test_settling(client: Upstream, rest: bytes, kept: bool) -> None:
    async with Server(says(CHUNKED, b"2\r\nok\r\n", rest, pause=0.02)) as server:
        for _ in range(2):
            async with client.open(server.url, "/", JSON, b"{}", timeouts=LIMITS) as response:
                assert await response.read() == b"ok"
                await response.settle(0.5)
        assert (server.connections == 1) is kept


async def test_an_answer_before_the_end_of_a_request_ends_the_connection(client: Upstream) -> None:
    """What is still to be sent would stand before the next request."""

    async def play(
        server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"Content-Length: 2\r\n" in head:
            await reader.readexactly(2)
        writer.write(OK)
        await server.left.wait()  # reads no more

    async with Server(play) as server:
        assert (await call(client, server.url, bytes(64 << 20)))[2] == b"ok"
        async with asyncio.timeout(60):
            assert (await call(client, server.url))[2] == b"ok"
        assert server.connections == 2


async def test_many_calls_at_once(client: Upstream) -> None:
    all_came = asyncio.Event()

    async def play(
        server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await server.read(reader)
        if len(server.requests) == 200:
            all_came.set()
        await all_came.wait()
        writer.write(OK)
        await reader.read()

    async with Server(play) as server:
        answers = await asyncio.gather(*[call(client, server.url) for _ in range(200)])
        assert [body for _, _, body in answers] == [b"ok"] * 200
        assert server.connections == 200


async def test_what_is_sent_arrives_unchanged(client: Upstream) -> None:
    body = bytes(range(256)) * 9000
    headers = [("Content-Type", "a/b"), ("X-Two", "1"), ("X-Two", "2"), ("X-Odd", "é")]
    async with Server(says(OK)) as server:
        async with client.open(
            server.url + "/base", "/v1/x?q=%2F&r", headers, body, timeouts=LIMITS
        ) as response:
            assert await response.read() == b"ok"
        head, _, sent = server.requests[0].partition(b"\r\n\r\n")
    assert sent == body
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v1/x?q=%2F&r HTTP/1.1"
    for name, value in headers:
        line = f"{name}: {value}".encode("utf-8", "surrogateescape")
        assert line in lines
    assert sum(line.lower().startswith(b"host:") for line in lines) == 1
    assert not any(line.lower().startswith(b"user-agent") for line in lines)


async def test_get_sends_no_body(client: Upstream) -> None:
    async with (
        Server(says(OK)) as server,
        client.open(server.url, "/m", [], b"", timeouts=LIMITS, method="GET") as response,
    ):
        assert await response.read() == b"ok"
        assert server.requests[0].startswith(b"GET /m HTTP/1.1\r\n")
        assert b"content-length" not in server.requests[0].lower()


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://h:99999", "nonsense", "http://[::1", "http://a\r\nb"]
)
async def test_addresses_that_cannot_be_called(client: Upstream, url: str) -> None:
    with pytest.raises(UpstreamError) as failure:
        await call(client, url)
    assert isinstance(failure.value, UpstreamRefused | UpstreamConnectError)


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "a\rb", "a\0b"])
async def test_no_header_can_begin_another(client: Upstream, value: str) -> None:
    async with Server(says(OK)) as server:
        with pytest.raises(UpstreamError):
            async with client.open(
                server.url, "/", [("X-Name", value)], b"{}", timeouts=Timeouts(2.0, 2.0)
            ) as response:
                await response.read()
        assert not any(b"Evil" in request for request in server.requests)


class Unplugged(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def writelines(self, list_of_data: object) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


PARTS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 100 C\r\n\r\n",
        b"HTTP/1.1 101 S\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n",
        b"\r\n",
        b"abc",
        b"3\r\nabc\r\n",
        b"0\r\n\r\n",
        b"\0",
        b"X" * 70_000,
    ]
)


@settings(max_examples=300)
@given(st.lists(PARTS | st.binary(max_size=40), max_size=10), st.integers(1, 9), st.booleans())
def test_whatever_comes_the_connection_is_whole_broken_or_waiting(
    parts: list[bytes], step: int, clean: bool
) -> None:
    """Fuzz: no exception leaves the protocol, and the same bytes cut otherwise mean the same."""
    from gateway.wire.connection import Connection  # only this client has such a part

    async def outcome(size: int) -> tuple[object, ...]:
        connection = Connection(asyncio.get_running_loop())
        transport = Unplugged()
        connection.connection_made(transport)
        connection.begin(b"POST / HTTP/1.1\r\n\r\n", b"", 5.0)
        data = b"".join(parts)
        for start in range(0, len(data), size):
            if not transport.aborted:
                connection.data_received(data[start : start + size])
        connection.connection_lost(None if clean else ConnectionResetError())
        body = b""
        try:
            await connection.head()
            while piece := await connection.read():
                body += piece
        except UpstreamBroken:
            return ("broken", connection.status, body, connection.end())
        return ("whole", connection.status, body, connection.end())

    runs = [asyncio.run(outcome(size)) for size in (1 << 20, 1 << 10, 4096 + step)]
    assert {run[0] for run in runs} <= {"whole", "broken"}
    assert not any(run[3] for run in runs)  # lost connections are never kept
    if all(run[0] == "whole" for run in runs):
        assert len(set(runs)) == 1
