"""The gateway as a process: start, ports, configuration mistakes, signals (C01, F02, F06)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from caserig import settles
from rig import (
    CHAT,
    DONE,
    END,
    ROLE,
    SSE_HEAD,
    STOP,
    ask,
    chat,
    chunk,
    completion,
    delta,
    eventually,
)
from stopwatch import Stopwatch, look

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def gateway() -> AsyncIterator[Start]:
    """``await gateway(*flags, env={})`` starts ``python -m gateway`` on free ports."""
    running: list[asyncio.subprocess.Process] = []

    async def start(*flags: str, env: dict[str, str] | None = None) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gateway", "--port", "0", "--admin-port", "0", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "HEADWATER_WORKERS__HEALTH_INTERVAL_S": "0.1", **(env or {})},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line(process: asyncio.subprocess.Process, word: str, within_s: float = 60.0) -> str:
    """The URL in the next line, which must begin with ``word``."""
    async with asyncio.timeout(within_s):
        said = (await process.stdout.readline()).decode()
    if not said:
        raise AssertionError((await process.stderr.read()).decode()[-2000:])
    assert said.startswith(f"{word} "), said
    return said.split()[1]


async def exit_code(process: asyncio.subprocess.Process) -> int:
    """Waits for the end; what it must wait for a CPU until then is seen."""
    while process.returncode is None:
        look()
        await asyncio.sleep(0.01)
    return process.returncode


async def draining(url: str) -> None:
    """Return once a gateway that was told to end has heard of it."""

    async def so() -> bool:
        return (await ask(url, "/ready")).status == 503

    await settles(so, 5.0)


async def test_it_starts_with_nothing_and_says_so(gateway, free_port) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    redis = f"redis://127.0.0.1:{free_port()}/0"
    process = await gateway("--workers", nobody, "--redis", redis)
    url = await line(process, "listening")
    async with asyncio.timeout(60):
        ready = await ask(url, "/ready")
        while f"{nobody}: not probed yet" in ready.json["reasons"]:
            ready = await ask(url, "/ready")
    assert ready.status == 503
    assert any(f"{nobody}: cannot connect" in reason for reason in ready.json["reasons"])
    assert any("redis" in note for note in ready.json["notes"])
    assert (await ask(url, "/health")).status == 200
    assert (await ask(url, "/v1/models")).json["data"] == []
    reply = await ask(url, CHAT, chat())
    assert reply.status in (404, 503)
    process.terminate()
    assert await process.wait() == 0


async def test_ready_is_told_and_sigterm_drains(gateway, stub) -> None:
    worker = await stub()
    end = asyncio.Event()
    worker.plays([SSE_HEAD, chunk(ROLE + delta("a")), end, chunk(delta("b") + STOP + DONE), END])
    process = await gateway("--workers", worker.url)
    url = await line(process, "listening")
    assert await line(process, "ready") == url
    streams = [asyncio.create_task(ask(url, CHAT, chat(stream=True))) for _ in range(10)]
    await eventually(lambda: len(worker.seen) == 10)
    process.terminate()
    await draining(url)
    late = await ask(url, CHAT, chat())
    assert (late.status, late.header("connection")) == (503, "close")
    assert late.header("retry-after")
    end.set()
    replies = await asyncio.gather(*streams)
    ended = Stopwatch()
    assert all((r.text, r.events[-1], r.complete) == ("ab", "[DONE]", True) for r in replies)
    assert await exit_code(process) == 0
    assert ended.seconds() < 1.0


async def test_streams_beyond_the_time_to_drain_get_an_error(gateway, stub, dial) -> None:
    worker = await stub()
    worker.plays([SSE_HEAD, chunk(ROLE + delta("a")), 60.0])
    process = await gateway("--workers", worker.url, env={"HEADWATER_LISTEN__DRAIN_S": "0.3"})
    url = await line(process, "listening")
    await line(process, "ready")
    client = await dial(url)
    await client.send("POST", CHAT, json.dumps(chat(stream=True)).encode())
    assert (await client.read(bodyless=True)).status == 200
    pieces = client.chunks()
    assert await anext(pieces) == ROLE + delta("a")
    process.terminate()
    rest = b"".join([piece async for piece in pieces])
    assert "error" in json.loads(rest.decode().strip().splitlines()[-1].removeprefix("data:"))
    assert await process.wait() == 0


async def test_a_second_sigterm_leaves_at_once(gateway, stub) -> None:
    worker = await stub()
    worker.plays([SSE_HEAD, chunk(ROLE + delta("a")), 60.0])
    process = await gateway("--workers", worker.url)
    url = await line(process, "listening")
    await line(process, "ready")
    running = asyncio.create_task(ask(url, CHAT, chat(stream=True)))
    await eventually(lambda: worker.seen)
    process.terminate()
    await draining(url)
    assert process.returncode is None
    process.send_signal(signal.SIGTERM)
    begun = Stopwatch()
    await exit_code(process)
    assert begun.seconds() < 1.0
    assert not (await running).complete


MISTAKES = [
    (["--workers", "nowhere"], {}, "workers.urls"),
    (["--workers", "http://a:1,http://a:1"], {}, "workers.urls"),
    (["--policy", "best"], {}, "routing.policy"),
    (["--admin-host", "0.0.0.0"], {}, "listen.admin_token"),
    (["-c", "/nonexistent.toml"], {}, "/nonexistent.toml"),
    ([], {"HEADWATER_ROUTING__RETRIES": "-1"}, "routing.retries"),
    ([], {"HEADWATER_ROUTING__RETRYS": "1"}, "ROUTING__RETRIES"),
]


@pytest.mark.parametrize(("flags", "env", "key"), MISTAKES, ids=[m[2] for m in MISTAKES])
async def test_mistakes_are_one_line_and_exit_code_2(gateway, flags, env, key) -> None:
    process = await gateway(*flags, env=env)
    _, err = await process.communicate()
    assert process.returncode == 2, err
    lines = err.decode().strip().splitlines()
    assert len(lines) == 1, lines
    assert key in lines[0]


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
async def test_a_taken_port_is_a_mistake(gateway, flag) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = await gateway(flag, port)
        _, err = await process.communicate()
    assert process.returncode == 2, err
    assert len(err.decode().strip().splitlines()) == 1
    assert port in err.decode()


async def test_one_dead_worker_of_two_is_no_mistake(gateway, stub, free_port) -> None:
    worker = await stub()
    worker.plays(completion())
    urls = f"http://127.0.0.1:{free_port()},{worker.url}"
    process = await gateway("--workers", urls)
    url = await line(process, "listening")
    await line(process, "ready")
    assert (await ask(url, CHAT, chat())).status == 200
