"""A running ``headwater up --fake`` for tests, on ports of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Queue

import httpx
import psutil
from ports import pick_row
from stopwatch import Limit

HEADWATER = str(Path(sys.executable).parent / "headwater")


class Up:
    """A running ``headwater up`` with its output."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        workers: int = 2,
        gateways: int = 1,
        real: bool = False,
    ) -> None:
        """``real``: workers with the default model instead of those without torch."""
        first = pick_row(10 * gateways + 2 + workers)
        self.port, self.worker_port = first + workers, first
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin = f"http://127.0.0.1:{self.port + 1}"
        self.process = subprocess.Popen(
            [
                *(HEADWATER, "up", *(() if real else ("--fake",)), "--workers", str(workers)),
                *("--gateways", str(gateways), "--port", str(self.port)),
                *("--worker-port", str(self.worker_port), *flags),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "XDG_STATE_HOME": str(folder),
                "HEADWATER_LEDGER__DIR": str(folder / "ledger"),
            },
        )
        self.lines: list[str] = []
        self._queue: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip())

    def end(self) -> int:
        """Stop it as Ctrl-C would, wait, and close its output; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def await_line(self, start: str, seconds: float = 60) -> str:
        limit = Limit(seconds)
        while not limit.over():
            try:
                line = self._queue.get(timeout=0.1)
            except Empty:
                if self.process.poll() is not None:
                    break
                continue
            self.lines.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(f"no line {start!r} in {self.lines}")

    def children(self, name: str) -> list[psutil.Process]:
        """Live children whose command line holds ``name``."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one as well
                if name in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def chat(self, text: str, url: str | None = None) -> httpx.Response:
        body = {
            "model": "fake",
            "max_tokens": 4,
            "temperature": 0,
            "messages": [{"role": "user", "content": text}],
        }
        return httpx.post(f"{url or self.url}/v1/chat/completions", json=body, timeout=30)

    def workers(self) -> list[dict[str, object]]:
        listing = httpx.get(f"{self.admin}/admin/workers", timeout=30).json()["workers"]
        return list(listing)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition that the system reaches by itself."""
    limit = Limit(seconds)
    while not limit.over():
        with contextlib.suppress(httpx.HTTPError, KeyError, psutil.NoSuchProcess):
            if condition():
                return
        time.sleep(0.1)
    raise AssertionError("it did not come true in time")


def ready_workers(up: Up) -> int:
    """How many workers may take requests."""
    return sum(entry["state"] == "ready" for entry in up.workers())
