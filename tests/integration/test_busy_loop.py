"""A gateway whose event loop was busy for long does not take that for a worker's silence."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
import uvloop

from gateway.upstream import Timeouts
from gateway.wire.client import WireUpstream

IDLE_S = 1.0
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("begun", [HEAD + b"1\r\na\r\n", HEAD, b""], ids=["body", "head", "none"])
def test_what_came_meanwhile_is_read_before_silence_is_told(new_loop, begun: bytes) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert runner.run(_answer_during_a_stall(listener, begun)) in (b"ab", b"b")


async def _answer_during_a_stall(listener: socket.socket, begun: bytes) -> bytes:
    """The worker goes on while the loop is busy for longer than it may be silent."""
    loop, upstream = asyncio.get_running_loop(), WireUpstream()
    reading = asyncio.create_task(_read(upstream, listener.getsockname()[1]))
    await asyncio.sleep(0)
    worker, _ = await asyncio.to_thread(listener.accept)
    await asyncio.to_thread(worker.recv, 65536)
    worker.sendall(begun)
    await asyncio.sleep(0.05)  # it is read, and more is waited for

    def stall() -> None:
        waker.recv(1)
        time.sleep(IDLE_S + 0.2)
        worker.sendall((b"" if begun else HEAD) + b"1\r\nb\r\n0\r\n\r\n")

    waker, other = socket.socketpair()
    with worker, waker, other:
        # In a callback of the loop's own reading: timers are due before it reads again.
        loop.add_reader(waker, stall)
        other.send(b"x")
        try:
            return await reading
        finally:
            loop.remove_reader(waker)
            await upstream.close()


async def _read(upstream: WireUpstream, port: int) -> bytes:
    call = upstream.open(f"http://127.0.0.1:{port}", "/", [], b"{}", timeouts=Timeouts(5.0, IDLE_S))
    body = b""
    async with call as response:
        while piece := await response.read():
            body += piece
    return body
