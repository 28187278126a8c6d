"""One connection per task: late answers, cancelled calls and refused handshakes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

import pytest
from rig import eventually
from stopwatch import Stopwatch

from shared.redislink import MAX_PIPELINE, RedisLink, RedisLost


class SlowEcho:
    """Speaks just enough RESP to answer ``ECHO`` late."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.mute = False
        self.connections = 0
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while line := await reader.readline():
                parts = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    parts.append((await reader.readexactly(size + 2))[:-2])
                if self.mute:
                    continue
                await asyncio.sleep(self.delay_s)
                if parts[0] in (b"FAIL", b"CLIENT", b"CLUSTER"):
                    writer.write(b"-ERR no\r\n")
                elif parts[0] == b"DEMOTED":
                    writer.write(b"-READONLY You can't write against a read only replica.\r\n")
                else:
                    writer.write(b"$%d\r\n%s\r\n" % (len(parts[1]), parts[1]))
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self.open -= 1
            writer.close()


@pytest.fixture
async def echo():
    server_side = SlowEcho()
    server = await asyncio.start_server(server_side.serve, "127.0.0.1", 0)
    server_side.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    yield server_side
    server.close()
    await server.wait_closed()


async def test_a_cancelled_call_never_answers_its_successor(echo) -> None:
    link, rng = RedisLink(echo.url, 30.0), Random(3)
    echo.delay_s = 0.01
    for turn in range(60):
        task = asyncio.create_task(link.call([("ECHO", f"lost {turn}")] * 2))
        await asyncio.sleep(rng.random() * 0.06)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert await link.call([("ECHO", f"kept {turn}")]) == [b"kept %d" % turn]
    await link.drop()
    assert not link.connected
    await eventually(lambda: echo.open == 0)


@pytest.mark.parametrize("query", ["", "?socket_timeout=60&socket_connect_timeout=60"])
async def test_a_silent_server_costs_the_time_limit_whatever_the_url_says(echo, query) -> None:
    link = RedisLink(echo.url + query, 0.1)
    echo.mute = True
    loop = asyncio.get_running_loop()
    started, clock = loop.time(), Stopwatch()
    with pytest.raises(RedisLost, match="in time"):
        await link.call([("ECHO", "x")])
    assert clock.seconds() < 10
    with pytest.raises(RedisLost, match="in time"):
        await link.call([("ECHO", "x")], wait_s=0.2)
    assert loop.time() - started > 0.35
    echo.mute = False
    assert await link.call([("ECHO", "y")]) == [b"y"]
    await link.drop()


async def test_an_error_reply_is_a_value_but_a_demoted_master_is_left(echo) -> None:
    link = RedisLink(echo.url, 1.0)
    first, second = await link.call([("FAIL", "x"), ("ECHO", "y")])
    assert isinstance(first, Exception)
    assert second == b"y"
    assert echo.connections == 1
    with pytest.raises(RedisLost, match="ReadOnly"):
        await link.call([("DEMOTED", "x")])
    assert not link.connected
    assert await link.call([("ECHO", "z")]) == [b"z"]
    assert echo.connections == 2
    await link.drop()


async def test_nobody_there_and_too_much_at_once(free_port) -> None:
    link = RedisLink(f"redis://user:secret@127.0.0.1:{free_port()}/0", 0.5)
    with pytest.raises(RedisLost) as caught:
        await link.call([("PING",)])
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="1001 commands"):
        await link.call([("PING",)] * (MAX_PIPELINE + 1))
