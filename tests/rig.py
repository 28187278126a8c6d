"""Scripted stub workers (S1..Sn of the cases) and a raw HTTP client, on plain sockets.

A stub answers ``GET /health``, ``/ready`` and ``/v1/models`` like a worker of another make, and for
each POST plays a script: a list of ``bytes`` (written at once), numbers (seconds to wait), events
(to wait for: what must last until the test has seen enough has no length) and ``Cut`` / ``Close``
marks. It records each request, and when its peer closed.

    stub = await Stub.start(models=("m",))
    stub.plays(stream(delta("a")), cut_stream(delta("x")))   # one per request, the last repeats
    stub.seen[0].body, stub.seen[0].header("host"), stub.seen[0].closed_at
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

from ports import pick_port
from servers import stop_listening
from stopwatch import Limit


class Mark(Enum):
    """Ends of a script that are no bytes."""

    CUT = auto()
    """Reset the connection."""
    CLOSE = auto()
    """Close it cleanly."""
    HANG = auto()
    """Nothing more, for ever."""


CUT, CLOSE, HANG = Mark.CUT, Mark.CLOSE, Mark.HANG
Action = bytes | float | int | Mark | asyncio.Event
Script = Sequence[Action]


@dataclass(eq=False)
class Seen:
    """One request as a stub got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    at: float
    """Monotonic seconds when its head was complete."""
    connection: int
    """Number of the connection it came on."""
    raw_head: bytes
    body: bytes = b""
    closed_at: float | None = None
    """When the peer closed during the script, or None."""
    done: bool = False
    """The script was played to its end."""

    def header(self, name: str) -> str | None:
        """First value of a header."""
        return next((v for n, v in self.headers if n.lower() == name.lower()), None)

    def values(self, name: str) -> list[str]:
        """All values of a header."""
        return [v for n, v in self.headers if n.lower() == name.lower()]

    @property
    def json(self) -> Any:
        """The decoded body."""
        return json.loads(self.body)


# --- pieces of scripts ---------------------------------------------------------------------------


def head(status: int = 200, *headers: tuple[str, str]) -> bytes:
    """Status line and headers."""
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


SSE_HEAD = head(200, ("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked"))


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


END = b"0\r\n\r\n"


def event(value: Any) -> bytes:
    """One SSE event with JSON data."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def delta(
    text: str | None = None, *, finish: str | None = None, index: int = 0, **more: Any
) -> bytes:
    """A chat chunk; ``more`` goes into the delta."""
    content = {} if text is None else {"content": text}
    choice = {"index": index, "delta": {**content, **more}, "finish_reason": finish}
    base = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event({**base, "choices": [choice]})


ROLE = delta(role="assistant")
STOP = delta(finish="stop")


def usage_event(prompt: int = 7, completion: int = 3, cached: int = 4) -> bytes:
    """The usage chunk of a stream."""
    base = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event({**base, "choices": [], "usage": usage(prompt, completion, cached)})


def usage(prompt: int = 7, completion: int = 3, cached: int = 4) -> dict[str, Any]:
    """A usage object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def stream(*events: bytes, gap_s: float = 0.0) -> list[Action]:
    """STREAM OK with these content events: role, contents, finish, ``[DONE]``."""
    actions: list[Action] = [SSE_HEAD]
    for piece in (ROLE, *events, STOP, DONE):
        actions += [chunk(piece), gap_s] if gap_s else [chunk(piece)]
    return [*actions, END]


def raw_stream(*pieces: bytes | float) -> list[Action]:
    """An event stream of exactly these bytes, one chunk each (numbers wait), cleanly ended."""
    return [SSE_HEAD, *(chunk(p) if isinstance(p, bytes) else p for p in pieces), END]


def cut_stream(*pieces: bytes | float, how: Mark = CUT) -> list[Action]:
    """An event stream that breaks off after these bytes."""
    return [SSE_HEAD, *(chunk(p) if isinstance(p, bytes) else p for p in pieces), 0.02, how]


def answer(value: Any, status: int = 200, *headers: tuple[str, str]) -> list[Action]:
    """A whole JSON answer."""
    return plain(json.dumps(value).encode(), status, ("Content-Type", "application/json"), *headers)


def plain(body: bytes, status: int = 200, *headers: tuple[str, str]) -> list[Action]:
    """A whole answer with a length."""
    return [head(status, *headers, ("Content-Length", str(len(body)))) + body]


def completion(text: str = "ok", **more: Any) -> list[Action]:
    """A whole chat completion with usage."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    base = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m"}
    return answer({**base, "choices": [choice], "usage": usage(), **more})


# --- the stub ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stub:
    """One scripted worker."""

    models: tuple[str, ...] = ("m",)
    parents: dict[str, str] = field(default_factory=dict)
    """Of those of its models that are adapters: the model they belong to."""
    root: str | None = None
    """Where the weights of all its models come from, if it says so."""
    seen: list[Seen] = field(default_factory=list)
    """Every POST, in order of arrival."""
    probes: int = 0
    healthy: bool = True
    """False: probes are answered with 500."""
    frozen: bool = False
    """True: connections are accepted and nothing is answered."""
    close_idle_s: float | None = None
    """Close a connection that was idle for this long after an answer."""
    close_after_answer: bool = False
    connections: int = 0
    open_connections: int = 0
    respond: Callable[[Seen], Script] | None = None
    """If set, it gives the script of each request."""
    port: int = 0
    _scripts: list[Script] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    async def start(cls, models: Sequence[str] = ("m",), port: int = 0) -> Stub:
        """Listen on loopback."""
        stub = cls(models=tuple(models))
        await stub.listen(port)
        return stub

    async def listen(self, port: int = 0) -> None:
        """Listen (again)."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self),
            "127.0.0.1",
            port or self.port or pick_port(),
            backlog=1024,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and drop all connections."""
        if self._server is not None:
            await stop_listening(self._server)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # sockets are closed a turn after their transports

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        """Name under which a gateway knows it."""
        return f"127.0.0.1:{self.port}"

    def plays(self, *scripts: Script) -> None:
        """Scripts for the requests to come, one each; the last one repeats."""
        self._scripts = list(scripts)

    def script_for(self, seen: Seen) -> Script:
        """What a request gets."""
        if self.respond is not None:
            return self.respond(seen)
        if not self._scripts:
            return completion()
        return self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]

    def probe(self, seen: Seen) -> Script:
        """Answer of a GET."""
        self.probes += 1
        if not self.healthy:
            return plain(b"ill", 500)
        if seen.target == "/v1/models":
            cards = [
                {
                    "id": m,
                    "object": "model",
                    "created": 1,
                    "owned_by": "x",
                    "parent": self.parents.get(m),
                    **({"root": self.root} if self.root else {}),
                }
                for m in self.models
            ]
            return answer({"object": "list", "data": cards})
        if seen.target in ("/health", "/ready"):
            return plain(b"")
        return plain(b"no such path", 404)


class _Connection(asyncio.Protocol):
    """One connection to a stub: requests are read and scripts played one after the other."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._buffer = bytearray()
        self._more = asyncio.Event()
        self._current: Seen | None = None
        self._used = False
        self._gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._stub.connections += 1
        self._stub.open_connections += 1
        self._number = self._stub.connections
        task = asyncio.get_running_loop().create_task(self._run())
        self._stub._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before its first step."""
        self._transport.close()
        self._stub._tasks.discard(task)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._more.set()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._gone = True
        self._stub.open_connections -= 1
        if self._current is not None and self._current.closed_at is None:
            self._current.closed_at = time.monotonic()
        self._more.set()

    async def _until(self, have: Callable[[], bool]) -> None:
        while not have():
            if self._gone:
                raise ConnectionResetError
            self._more.clear()
            await self._more.wait()

    async def _run(self) -> None:
        try:
            while not self._gone:
                seen = await self._read()
                if self._stub.frozen:
                    await asyncio.Event().wait()
                # Also what looks at stored responses, and deletes them.
                stored = seen.target.startswith("/v1/responses/")
                if seen.method not in ("GET", "HEAD") or stored:
                    self._stub.seen.append(seen)
                    script = self._stub.script_for(seen)
                else:
                    script = self._stub.probe(seen)
                self._current = seen
                await self._play(script)
                seen.done = True
                self._current, self._used = None, True
                if self._stub.close_after_answer and seen.method == "POST":
                    break
        except (ConnectionResetError, TimeoutError):
            pass

    async def _read(self) -> Seen:
        # As real servers do: what has just connected has longer to send its first request.
        idle = self._stub.close_idle_s if self._used else None
        async with asyncio.timeout(idle):
            await self._until(lambda: b"\r\n\r\n" in self._buffer)
        raw, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer = bytearray(rest)
        first, *lines = raw.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = [(n, v.strip()) for n, _, v in (line.partition(":") for line in lines)]
        seen = Seen(method, target, headers, time.monotonic(), self._number, raw)
        length = seen.header("content-length")
        if seen.header("transfer-encoding") is not None:
            seen.body = await self._read_chunked()
        elif length is not None:
            await self._until(lambda: len(self._buffer) >= int(length))
            seen.body = bytes(self._buffer[: int(length)])
            del self._buffer[: int(length)]
        return seen

    async def _read_chunked(self) -> bytes:
        body = b""
        while True:
            await self._until(lambda: b"\r\n" in self._buffer)
            line, _, rest = bytes(self._buffer).partition(b"\r\n")
            size = int(line.split(b";")[0], 16)
            self._buffer = bytearray(rest)
            await self._until(lambda size=size: len(self._buffer) >= size + 2)  # type: ignore[misc]
            body += bytes(self._buffer[:size])
            del self._buffer[: size + 2]
            if size == 0:
                return body

    async def _play(self, script: Script) -> None:
        for action in script:
            if self._gone:
                raise ConnectionResetError
            if isinstance(action, bytes):
                self._transport.write(action)
            elif isinstance(action, Mark):
                if action is HANG:
                    await self._until(lambda: False)
                elif action is CUT:
                    link = self._transport.get_extra_info("socket")
                    link.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
                    self._transport.abort()
                raise ConnectionResetError
            elif isinstance(action, asyncio.Event):
                await self._held(action)
            else:
                try:
                    async with asyncio.timeout(action):
                        await self._until(lambda: False)
                except TimeoutError:
                    pass

    async def _held(self, gate: asyncio.Event) -> None:
        """Wait for an event, or for the peer to leave."""
        opening = asyncio.ensure_future(gate.wait())
        opening.add_done_callback(lambda _: self._more.set())
        try:
            await self._until(gate.is_set)
        finally:
            opening.cancel()


# --- a client ------------------------------------------------------------------------------------


@dataclass
class Reply:
    """An answer as raw as it came."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    complete: bool
    """It ended as its framing said it would."""

    def header(self, name: str) -> str | None:
        """First value of a header."""
        return next((v for n, v in self.headers if n.lower() == name.lower()), None)

    @property
    def json(self) -> Any:
        """The decoded body."""
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """Data of each event, as a strict client reads them: line by line."""
        return [
            line.removeprefix("data:").strip()
            for line in self.body.decode().splitlines()
            if line.startswith("data:")
        ]

    @property
    def text(self) -> str:
        """Joined content of a chat stream."""
        chunks = [json.loads(data) for data in self.events if data != "[DONE]"]
        choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
        return "".join(choice.get("delta", {}).get("content") or "" for choice in choices)


class RawClient:
    """One connection to a gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, url: str) -> RawClient:
        """Open a connection to a base URL."""
        host, _, port = url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def send(
        self, method: str, target: str, body: bytes | None = None, *headers: tuple[str, str]
    ) -> None:
        """Write one request; a JSON content type unless another is given."""
        lines = [f"{method} {target} HTTP/1.1", "Host: gateway"]
        names = {name.lower() for name, _ in headers}
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
            if "content-type" not in names:
                lines.append("Content-Type: application/json")
        lines += [f"{name}: {value}" for name, value in headers]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b""))
        await self.writer.drain()

    async def read(self, *, bodyless: bool = False) -> Reply:
        """Read one whole answer, or only its head."""
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        headers = [(n, v.strip()) for n, _, v in (line.partition(":") for line in lines)]
        reply = Reply(int(first.split(" ")[1]), headers, b"", complete=True)
        if reply.status == 100:
            return await self.read(bodyless=bodyless)
        if bodyless:
            return reply
        try:
            if (reply.header("transfer-encoding") or "").lower() == "chunked":
                async for piece in self.chunks():
                    reply.body += piece
            elif (length := reply.header("content-length")) is not None:
                reply.body = await self.reader.readexactly(int(length))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            reply.complete = False
        return reply

    async def chunks(self) -> Any:
        """Bytes of a chunked body, chunk by chunk."""
        while True:
            size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
            piece = await self.reader.readexactly(size + 2)
            if size == 0:
                return
            yield piece[:-2]

    async def ask(
        self, method: str, target: str, body: bytes | None = None, *headers: tuple[str, str]
    ) -> Reply:
        """One request and its answer."""
        await self.send(method, target, body, *headers)
        return await self.read()

    def close(self) -> None:
        """Close the connection at once."""
        self.writer.close()

    def abort(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()


async def ask(
    url: str,
    target: str,
    body: Any = None,
    *headers: tuple[str, str],
    method: str | None = None,
    bodyless: bool = False,
) -> Reply:
    """One request on a connection of its own; a body that is not bytes is sent as JSON.

    ``bodyless``: whatever the answer announces, it has no body (HEAD).
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    client = await RawClient.connect(url)
    try:
        await client.send(method or ("GET" if data is None else "POST"), target, data, *headers)
        return await client.read(bodyless=bodyless)
    finally:
        client.close()


CHAT = "/v1/chat/completions"


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    """CHAT(x) of the cases."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


async def eventually(check: Callable[[], Any], within_s: float = 20.0) -> Any:
    """Wait until ``check()`` is true; returns its value."""
    limit = None
    while True:
        value = check()
        if value:
            return value
        limit = limit or Limit(within_s)
        assert not limit.over(), "it did not happen in time"
        await asyncio.sleep(0.01)
