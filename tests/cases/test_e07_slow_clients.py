"""E07: requests that are sent byte by byte do not hold connections for ever.

Scaled: limits of half a second instead of 30 s for a head and 20 s for a body; 100 slow clients of
each kind instead of 500.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from caserig import body_for
from ports import pick_port
from rig import CHAT, DONE, END, ROLE, SSE_HEAD, STOP, RawClient, ask, chunk, completion, delta

from gateway.wire import limits
from shared import slowbody
from worker import httpserver
from worker.config import CacheConfig, ModelConfig, ServeConfig, WorkerConfig
from worker.server import WorkerServer

HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n".encode()
SLOW = 100


async def trickle(url: str, start: bytes, piece: bytes) -> bytes:
    """Send a piece each 50 ms until the server closes; all that it said before."""
    client = await RawClient.connect(url)
    client.writer.write(start)
    said: list[bytes] = []

    async def listen() -> None:
        # A piece that is under way when the server closes is answered by a reset.
        with suppress(ConnectionResetError):
            while heard := await client.reader.read(65_536):
                said.append(heard)

    reading = asyncio.create_task(listen())
    while not reading.done():
        client.writer.write(piece)
        await asyncio.sleep(0.05)
    client.abort()
    await reading
    return b"".join(said)


async def test_slow_requests_end_and_others_do_not_notice(stub, serve, monkeypatch) -> None:
    monkeypatch.setattr(limits, "HEAD_S", 0.5)
    monkeypatch.setattr(limits, "BODY_S", 0.5)
    worker = await stub()
    served = await serve(worker)
    long = [SSE_HEAD, *[chunk(ROLE + delta("x")), 0.1] * 20, chunk(STOP + DONE), END]
    worker.respond = lambda seen: long if b"true" in seen.body else completion()
    stream = asyncio.create_task(ask(served.url, CHAT, body_for(CHAT, "x", stream=True)))
    sized = HEAD + b"Content-Length: 1000000\r\n\r\n"
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    slow = [
        asyncio.create_task(trickle(served.url, start, piece))
        for start, piece in ((HEAD + b"X-A: ", b"a"), (sized, b"b"), (chunked, b"1\r\na\r\n"))
        for _ in range(SLOW // 2)
    ]
    for n in range(10):
        assert (await ask(served.url, CHAT, body_for(CHAT, f"{n}"))).status == 200
    async with asyncio.timeout(30):
        said = await asyncio.gather(*slow)
    for answer in said:
        assert answer == b"" or answer.startswith((b"HTTP/1.1 408", b"HTTP/1.1 400")), answer[:99]
    whole = await stream
    assert whole.complete
    assert whole.text == "x" * 20
    assert len(worker.seen) == 11


async def test_a_workers_listeners_end_them_too(monkeypatch, own_worker: tuple[str, str]) -> None:
    monkeypatch.setattr(httpserver, "HEAD_S", 0.5)
    monkeypatch.setattr(slowbody, "BODY_S", 0.5)
    for url, path in zip(own_worker, (CHAT, "/v1/load_lora_adapter"), strict=True):
        head = HEAD.replace(CHAT.encode(), path.encode())
        sized, chunked = b"Content-Length: 1000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
        starts = [(b"", b""), (head + b"X-A: ", b"a")]
        starts += [(head + sized, b"b"), (head + sized, b""), (head + chunked, b"1\r\na\r\n")]
        async with asyncio.timeout(30):
            said = await asyncio.gather(*(trickle(url, *start) for start in starts))
        assert said[:2] == [b"", b""]
        for answer in said[2:]:
            assert answer.startswith(b"HTTP/1.1 408"), answer[:99]
            assert b'{"error"' in answer


@pytest.fixture
async def own_worker() -> AsyncIterator[tuple[str, str]]:
    """The URLs of a worker in this process, public and admin."""
    ports, ready = (pick_port(), pick_port()), asyncio.Event()
    config = WorkerConfig(
        model=ModelConfig(path="fake"),
        cache=CacheConfig(kv_blocks=64),
        serve=ServeConfig(port=ports[0], admin_port=ports[1]),
    )
    task = asyncio.create_task(WorkerServer(config, announce=lambda _: ready.set()).run())
    await ready.wait()
    yield f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 20)
