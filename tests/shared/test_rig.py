"""The tools of the tests: a stub that is stopped leaves nothing behind, whatever was under way."""

from __future__ import annotations

import asyncio
import socket

import pytest
from rig import Stub


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_a_stub_that_stops_closes_what_has_just_connected(turns: int, said: bytes) -> None:
    loop = asyncio.get_running_loop()
    stub = await Stub.start()
    with socket.create_connection(("127.0.0.1", stub.port)) as client:
        client.setblocking(False)
        client.send(said)
        for _ in range(turns):
            await asyncio.sleep(0)
        await stub.stop()
        assert stub.open_connections == 0
        try:
            while await asyncio.wait_for(loop.sock_recv(client, 4096), 5):
                pass
        except ConnectionError:
            pass
