"""A worker's life: loading, leaving clients, draining, second signals, bad starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from shared.rediskeys import RedisKeys
from shared.types import WorkerId
from tests.workerrig import CHAT, COMPLETIONS, Client, chat, completion, error_of, parse_events
from worker.build import Model, load_model
from worker.config import CacheConfig, ModelConfig, ServeConfig, WorkerConfig
from worker.runner import StepPlan, StepResult
from worker.server import WorkerServer

SLOW = {"HEADWATER_FAKE__DECODE_MS_PER_STEP": "20"}
ENDLESS = {"max_tokens": 2000, "ignore_eos": True}


async def until(check: Callable[[], Any], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await check():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


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
            left = time.monotonic()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            await until(lambda: idle(client), 1.0)
            assert time.monotonic() - left < 1.0


async def test_the_first_delta_is_not_held_back(worker_process: Any) -> None:
    worker = worker_process(env={"HEADWATER_FAKE__DECODE_MS_PER_STEP": "100"})
    async with Client(worker.url) as client:
        gaps = []
        body = chat("slow", max_tokens=8, ignore_eos=True, stream=True)
        async with client.http.stream("POST", CHAT, json=body) as response:
            last = time.monotonic()
            async for line in response.aiter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()
        # The first token comes from the prefill, each other one a step later: none is held back
        # for company.
        assert len(gaps) == 8
        assert sum(gap > 0.05 for gap in gaps[1:]) >= 6


# --- draining ----------------------------------------------------------------------------------


async def test_drain_finishes_streams_and_refuses_new_ones(worker_process: Any) -> None:
    worker = worker_process(env=SLOW)
    async with Client(worker.url) as client, Client(worker.url) as other:
        body = chat("drain", max_tokens=80, ignore_eos=True)
        streams = [asyncio.create_task(client.stream(CHAT, body)) for _ in range(5)]
        await until(lambda: running(client, 5))
        worker.terminate()

        async def draining() -> bool:
            return (await other.http.get("/ready")).status_code == 503

        await until(draining, 1.0)
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
            assert len(stream.text()) == 80
    ended = time.monotonic()
    assert worker.wait(5) == 0
    assert time.monotonic() - ended < 1.5


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
    assert worker.wait(5) == 0


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
        assert worker.wait(2) == 128 + signal.SIGTERM
        await asyncio.gather(task, return_exceptions=True)


def test_an_idle_worker_leaves_at_once_and_quietly(worker_process: Any) -> None:
    worker = worker_process()
    before = time.monotonic()
    worker.process.send_signal(signal.SIGINT)
    assert worker.wait(5) == 0
    assert time.monotonic() - before < 1.5
    assert "Traceback" not in worker.stderr.read_text()
    assert worker.stdout.read_text() == f"ready {worker.url} model=fake\n"


# --- starting ----------------------------------------------------------------------------------


def run_worker(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "worker", "--model", "fake", *flags]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=20, check=False
    )


def test_bad_starts_are_one_line_and_exit_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            (run_worker("--port", port), "serve.port", port),
            (run_worker("--port", "0", "--admin-port", port), "serve.admin_port", port),
            (run_worker("--port", "0", "--admin-host", "0.0.0.0"), "serve.admin_token", "0.0.0.0"),
            (run_worker("--port", "0", "--block-size", "0"), "cache.block_size", "0"),
            (run_worker("--port", "0", "--redis", "ftp://x"), "redis.url", "ftp://x"),
            (run_worker("--port", "0", HEADWATER_CACHE__KV_BLOKS="3"), "kv_bloks", "KV_BLOCKS"),
        ]
    for result, key, value in cases:
        assert result.returncode == 2, result.stderr
        line = result.stderr.strip().splitlines()[-1]
        assert key in line.lower()
        assert value in line
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


def test_help_has_an_example() -> None:
    result = run_worker("--help")
    assert result.returncode == 0
    assert "Example" in result.stdout
    assert run_worker("--nonsense").returncode == 2


class Inside:
    """A worker in this process, whose model is made by the test."""

    def __init__(self, load: Callable[[WorkerConfig], Model], port: int) -> None:
        config = WorkerConfig(
            model=ModelConfig(path="fake"),
            cache=CacheConfig(kv_blocks=64),
            serve=ServeConfig(port=port),
        )
        self.lines: list[str] = []
        self.url = f"http://127.0.0.1:{port}"
        self.task = asyncio.create_task(
            WorkerServer(config, load=load, announce=self.lines.append).run()
        )


@pytest.fixture
async def inside(free_port: Callable[[], int]) -> AsyncIterator[Callable[..., Inside]]:
    made: list[Inside] = []

    def start(load: Callable[[WorkerConfig], Model]) -> Inside:
        made.append(Inside(load, free_port()))
        return made[-1]

    yield start
    for one in made:
        if not one.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(one.task, 5)


async def test_listens_before_the_model_is_loaded(inside: Callable[..., Inside]) -> None:
    go_on = threading.Event()

    def slow_load(config: WorkerConfig) -> Model:
        go_on.wait(20)
        return load_model(config)

    server = inside(slow_load)
    async with Client(server.url) as client:

        async def listening() -> bool:
            with contextlib.suppress(Exception):
                return (await client.http.get("/health")).status_code == 200
            return False

        await until(listening)
        answer = await client.http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == ["loading model"]
        answer = await client.post(CHAT, chat("early"))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        error_of(answer)
        for path in ("/headwater/info", "/headwater/load", "/headwater/events"):
            assert (await client.http.get(path)).status_code == 503
        assert (await client.http.get("/v1/models")).status_code == 200
        assert (await client.http.get("/metrics")).status_code == 200
        assert not server.lines
        go_on.set()

        async def ready() -> bool:
            return (await client.http.get("/ready")).status_code == 200

        await until(ready)
        assert server.lines == [f"ready {server.url} model=fake"]
        assert (await client.post(CHAT, chat("now", max_tokens=1))).status_code == 200


async def test_a_signal_while_loading_leaves_at_once(inside: Callable[..., Inside]) -> None:
    go_on = threading.Event()
    loading = threading.Event()

    def slow_load(config: WorkerConfig) -> Model:
        loading.set()
        go_on.wait(20)
        return load_model(config)

    server = inside(slow_load)
    await asyncio.to_thread(loading.wait, 5)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(server.task, 2) == 0
    go_on.set()


class Crashing:
    """A runner that dies after some steps, of something nobody foresaw."""

    def __init__(self, runner: Any, steps: int) -> None:
        self._runner, self._steps = runner, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: StepPlan) -> StepResult:
        self._steps -= 1
        if self._steps < 0:
            raise ZeroDivisionError("the device is gone")
        result: StepResult = self._runner.run(plan)
        return result


async def test_a_dead_engine_is_neither_ready_nor_alive(inside: Callable[..., Inside]) -> None:
    def load(config: WorkerConfig) -> Model:
        model = load_model(config)
        return Model(Crashing(model.runner, 3), model.bundle)

    server = inside(load)
    async with Client(server.url) as client:

        async def ready() -> bool:
            with contextlib.suppress(Exception):
                return (await client.http.get("/ready")).status_code == 200
            return False

        await until(ready)
        body = completion("x", max_tokens=9, ignore_eos=True, stream=True)
        answer = await client.post(COMPLETIONS, body)
        events, done = parse_events(answer.text)
        assert answer.status_code == 200
        assert len([event for event in events if "error" in event]) == 1
        assert "error" in events[-1]
        assert not done
        assert "device" not in answer.text
        answer = await client.http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["reasons"]
        assert (await client.http.get("/health")).status_code == 503
        answer = await client.post(COMPLETIONS, completion("y"))
        assert answer.status_code == 503
        error_of(answer)


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
        assert worker.wait(5) == 0
        assert not await eyes.exists(key)


async def test_serving_does_not_notice_redis(redis_server: Any, worker_process: Any) -> None:
    worker = worker_process("--redis", redis_server.url)
    async with Client(worker.url) as client, Client(worker.admin_url) as admin:

        async def up() -> bool:
            return bool((await admin.http.get("/admin/cache")).json()["redis"]["up"])

        async def down() -> bool:
            return not await up()

        async def serve(mark: str) -> float:
            started = time.monotonic()
            for turn in range(20):
                body = chat(f"{mark} {turn}", max_tokens=5, ignore_eos=True)
                assert (await client.ask(CHAT, body))["usage"]["completion_tokens"] == 5
            return time.monotonic() - started

        await until(up)
        await serve("up")
        redis_server.freeze()
        assert await serve("frozen") < 2
        await until(down)
        redis_server.thaw()
        await until(up)
        redis_server.stop()
        assert await serve("stopped") < 2
        await until(down)
        redis_server.start()
        await until(up)
        assert (await client.http.get("/ready")).status_code == 200
