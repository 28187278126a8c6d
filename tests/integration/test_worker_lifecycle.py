"""A worker's life: clients that leave, draining, second signals, Redis beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from stopwatch import Stopwatch

from shared.rediskeys import RedisKeys
from shared.types import WorkerId
from tests.workerrig import CHAT, COMPLETIONS, Client, chat, completion, error_of, until

SLOW = {"HEADWATER_FAKE__DECODE_MS_PER_STEP": "20"}
ENDLESS = {"max_tokens": 2000, "ignore_eos": True}
LASTING = 250
"""Tokens of an answer that takes five seconds: time for all that is asked meanwhile."""


async def idle(client: Client) -> bool:
    load = await client.load()
    return (load["running"], load["waiting"], load["blocks_used"]) == (0, 0, 0)


async def running(client: Client, count: int) -> bool:
    return bool((await client.load())["running"] == count)


# --- clients that leave ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields", [{}, {"n": 3}])
async def test_a_client_that_leaves_aborts(
    worker_process: Any, stream: bool, fields: dict[str, Any]
) -> None:
    worker = worker_process(env=SLOW)
    place = urlsplit(worker.url)
    body = json.dumps(chat("bye", stream=stream, **ENDLESS, **fields)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with Client(worker.url) as client:
        for _ in range(3):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: running(client, fields.get("n", 1)))
            if stream:
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            left = Stopwatch()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            await until(lambda: idle(client), 1.0)
            assert left.seconds() < 1.0


async def test_the_first_delta_is_not_held_back(worker_process: Any) -> None:
    worker = worker_process(env={"HEADWATER_FAKE__DECODE_MS_PER_STEP": "300"})
    async with Client(worker.url) as client:
        gaps = []
        body = chat("slow", max_tokens=6, ignore_eos=True, stream=True)
        async with client.http.stream("POST", CHAT, json=body) as response:
            last = time.monotonic()
            async for line in response.aiter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()
        # The first token comes from the prefill, each other one a step later: none is held back
        # for company, which would make every other gap none.
        assert len(gaps) == 6
        assert sum(gap > 0.05 for gap in gaps[1:]) >= 4


# --- draining ----------------------------------------------------------------------------------


async def test_drain_finishes_streams_and_refuses_new_ones(worker_process: Any) -> None:
    worker = worker_process(env=SLOW)
    async with Client(worker.url) as client, Client(worker.url) as other:
        body = chat("drain", max_tokens=LASTING, ignore_eos=True)
        streams = [asyncio.create_task(client.stream(CHAT, body)) for _ in range(5)]
        await until(lambda: running(client, 5))
        worker.terminate()

        async def draining() -> bool:
            return (await other.http.get("/ready")).status_code == 503

        await until(draining)
        assert (await other.http.get("/ready")).json()["reasons"] == ["draining"]
        assert (await other.http.get("/health")).status_code == 200
        assert (await other.load())["draining"] is True
        for stream in (False, True):
            answer = await other.post(CHAT, chat("late", stream=stream))
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            error_of(answer)
        for stream in await asyncio.gather(*streams):
            assert stream.done == 1
            assert stream.finishes() == ["length"]
            assert len(stream.text()) == LASTING
    ended = Stopwatch()
    assert worker.wait() == 0
    assert ended.seconds() < 5


async def test_streams_beyond_the_grace_time_get_an_error(worker_process: Any) -> None:
    worker = worker_process(env={**SLOW, "HEADWATER_SERVE__DRAIN_S": "0.3"})
    async with Client(worker.url) as client:
        streams = [asyncio.create_task(client.stream(CHAT, chat("x", **ENDLESS)))]
        whole = asyncio.create_task(client.post(CHAT, chat("y", **ENDLESS)))
        await until(lambda: running(client, 2))
        worker.terminate()
        stream = await streams[0]
        assert stream.text()
        assert len(stream.errors) == 1
        assert (stream.done, stream.finishes()) == (0, [])
        answer = await whole
        assert answer.status_code == 503
        error_of(answer)
    assert worker.wait() == 0


async def test_a_second_signal_leaves_at_once(worker_process: Any) -> None:
    worker = worker_process(env=SLOW)
    async with Client(worker.url) as client:
        task = asyncio.create_task(client.stream(CHAT, chat("x", **ENDLESS)))
        await until(lambda: running(client, 1))
        worker.terminate()

        async def draining() -> bool:
            return (await client.http.get("/ready")).status_code == 503

        await until(draining)
        worker.terminate()
        assert worker.wait(15) == 128 + signal.SIGTERM
        await asyncio.gather(task, return_exceptions=True)


def test_an_idle_worker_leaves_at_once_and_quietly(worker_process: Any) -> None:
    worker = worker_process()
    before = Stopwatch()
    worker.process.send_signal(signal.SIGINT)
    assert worker.wait() == 0
    assert before.seconds() < 5
    assert "Traceback" not in worker.stderr.read_text()
    assert worker.stdout.read_text() == f"ready {worker.url} model=fake\n"


# --- Redis -------------------------------------------------------------------------------------


async def test_worker_registers_and_withdraws(redis_server: Any, worker_process: Any) -> None:
    worker = worker_process("--redis", redis_server.url)
    async with Client(worker.url) as client, Redis.from_url(redis_server.url, protocol=2) as eyes:
        info = (await client.http.get("/headwater/info")).json()
        names = RedisKeys("headwater")
        key = names.worker(WorkerId(info["id"]))

        async def registered() -> bool:
            return bool(await eyes.exists(key))

        await until(registered)
        secret = "a very private prompt, never to be seen elsewhere"
        await client.ask(COMPLETIONS, completion(secret, max_tokens=1))
        log = names.log(names.shard_of(WorkerId(info["id"])))

        async def logged() -> bool:
            return bool(await eyes.xlen(log))

        await until(logged)
        for name in await eyes.keys("*"):
            assert b"private" not in await eyes.dump(name)
        worker.terminate()
        assert worker.wait() == 0
        assert not await eyes.exists(key)


async def test_serving_does_not_notice_redis(redis_server: Any, worker_process: Any) -> None:
    worker = worker_process("--redis", redis_server.url)
    async with Client(worker.url) as client, Client(worker.admin_url) as admin:

        async def up() -> bool:
            return bool((await admin.http.get("/admin/cache")).json()["redis"]["up"])

        async def down() -> bool:
            return not await up()

        async def serve(mark: str) -> float:
            started = Stopwatch()
            for turn in range(20):
                body = chat(f"{mark} {turn}", max_tokens=5, ignore_eos=True)
                assert (await client.ask(CHAT, body))["usage"]["completion_tokens"] == 5
            return started.seconds()

        await until(up)
        usual = await serve("up")
        redis_server.freeze()
        # A wait for Redis in each request would be ten seconds.
        assert await serve("frozen") < 2 * usual + 2
        await until(down)
        redis_server.thaw()
        await until(up)
        redis_server.stop()
        assert await serve("stopped") < 2 * usual + 2
        await until(down)
        redis_server.start()
        await until(up)
        assert (await client.http.get("/ready")).status_code == 200
