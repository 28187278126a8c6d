"""How a worker starts, well and badly, and what its dead engine looks like."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workerrig import (
    CHAT,
    COMPLETIONS,
    Client,
    chat,
    completion,
    error_of,
    parse_events,
    until,
)
from worker.build import Model, load_model
from worker.config import CacheConfig, ModelConfig, ServeConfig, WorkerConfig
from worker.runner import StepPlan, StepResult
from worker.server import WorkerServer


def run_worker(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "worker", "--model", "fake", *flags]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=100, check=False
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
            (run_worker("--port", "0", "--device", "tpu"), "model.device", "tpu"),
            (run_worker("--port", "0", "--device", "cuda:0"), "model.device", "cuda:0"),
            (run_worker("--port", "0", HEADWATER_CACHE__KV_BLOKS="3"), "kv_bloks", "KV_BLOCKS"),
        ]
    for result, key, value in cases:
        assert result.returncode == 2, result.stderr
        line = result.stderr.strip().splitlines()[-1]
        assert key in line.lower()
        assert value in line
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize("path", ["/no/such/place", "", "folder", "text.gguf"])
def test_a_wrong_model_path_is_told_before_torch_is_imported(path: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.gguf").write_text("no model")
    code = (
        "import sys; from worker.__main__ import main; code = main()\n"
        "print('torch' in sys.modules); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--port", "0", "--model", path],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(f"worker: model.path: {path!r}: ")
    assert result.stdout == "False\n"


def test_that_a_hub_has_no_such_model_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from worker.__main__ import main; code = main()\n"
        "print('torch' in sys.modules); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--port", "0", "--model", "nobody/nothing"],
        env={
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path),
            "HEADWATER_LOG__LEVEL": "error",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 2
    assert "not fetched from the model hub" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == "fetching nobody/nothing from the model hub\nFalse\n"


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
            await asyncio.wait_for(one.task, 60)


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
        go_on.wait(60)
        return load_model(config)

    server = inside(slow_load)
    assert await asyncio.to_thread(loading.wait, 60)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(server.task, 20) == 0
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


LOADING = """
import atexit, os, time
import worker.build

def load(config, progress):
    atexit.register(os.abort)  # as native code does whose thread still runs when Python ends
    print("loading", flush=True)
    time.sleep(600)

worker.build.load_model = load
from worker.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads_ends_it_well(
    number: signal.Signals, free_port: Callable[[], int]
) -> None:
    ports = ["--port", str(free_port()), "--admin-port", str(free_port())]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", LOADING, "--model", "fake", *ports],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(number)
    told = process.communicate(timeout=30)[1]
    assert process.returncode == 0, told
    assert '"event": "listening"' in told
    assert "Traceback" not in told
