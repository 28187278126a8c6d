"""A compose project of its own name and port, what stands in it, and streams that run meanwhile."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

ROOT = Path(__file__).resolve().parents[1]
Messages = list[dict[str, str]]
T = TypeVar("T")
IN_TURN = {"x-headwater-policy": "round_robin"}
"""Obeyed under ``tests/compose/spread.yaml``; elsewhere idle workers need not be asked in turn."""


def docker(*arguments: str) -> str:
    """Output of a docker command, which must succeed."""
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, f"docker {arguments}: {done.stdout[-500:]}{done.stderr[-2000:]}"
    return done.stdout.strip()


def wait_for(what: str, look: Callable[[], T], seconds: float = 60.0) -> T:
    """The first true answer of ``look``; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.25)
    return seen


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Project:
    """Compose files under a profile, in a project whose name nobody else has."""

    def __init__(
        self, profile: str, files: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.name = f"hwtest-{uuid.uuid4().hex[:8]}"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._files = [part for name in files for part in ("-f", name)]
        self.env = {
            "HEADWATER_APT_PACKAGES": "",  # base images of a test machine may be without apt
            **os.environ,
            "COMPOSE_PROFILES": profile,
            "COMPOSE_PROJECT_NAME": self.name,
            "HEADWATER_PORT": str(self.port),
            **(env or {}),
        }

    def compose(self, *arguments: str) -> str:
        """Output of ``docker compose``, which must succeed."""
        done = subprocess.run(
            ["docker", "compose", *self._files, *arguments],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=1500,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def config(self) -> dict[str, Any]:
        """The whole model, as Compose understands it."""
        return dict(json.loads(self.compose("config", "--format", "json")))

    def up(self, *arguments: str) -> None:
        """Start, and wait until all are healthy; tells their logs if they do not get there."""
        try:
            self.compose("up", "-d", "--wait", "--wait-timeout", "600", *arguments)
        except AssertionError as error:
            error.add_note(self.compose("ps", "-a") + self.compose("logs", "--tail", "40"))
            raise

    def down(self) -> None:
        self.compose("down", "-v", "--timeout", "45")

    def containers(self, service: str) -> list[str]:
        """Ids of the service's containers, running or not."""
        return self.compose("ps", "-a", "-q", "--no-trunc", service).split()

    def chat(
        self,
        messages: Messages,
        model: str,
        max_tokens: int = 8,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        answer = httpx.post(
            f"{self.url}/v1/chat/completions",
            json={"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0},
            headers=headers,
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return answer

    def ask(
        self, text: str, model: str = "fake", headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        return self.chat([{"role": "user", "content": text}], model, 2, headers)

    def model(self) -> str:
        return str(httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"][0]["id"])

    def served_by(self, asked: int = 4, model: str = "fake") -> set[str]:
        """Workers that answer new prompts; all of them have to be answered."""
        return {
            self.ask(f"Hello {uuid.uuid4()}", model, IN_TURN).headers["x-headwater-worker"]
            for _ in range(asked)
        }

    def wait_for_workers(self, number: int, model: str = "fake") -> set[str]:
        """The names of workers, once so many serve."""

        def look() -> set[str]:
            seen = self.served_by(2 * number, model)
            return seen if len(seen) == number else set()

        return wait_for(f"{number} workers serve", look, 120)

    def metrics(self) -> dict[str, float]:
        """The gateway's own figures, read on the admin port inside its container."""
        code = (
            "import urllib.request as u; "
            "print(u.urlopen('http://127.0.0.1:8001/metrics', timeout=5).read().decode())"
        )
        text = self.compose("exec", "-T", "gateway", "python", "-c", code)
        lines = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, _, value in lines}


class Stream(threading.Thread):
    """One streamed answer, read in the background."""

    def __init__(self, project: Project, prompt: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self._prompt, self._max_tokens = project.url, prompt, max_tokens
        self.worker = ""
        self.text = ""
        self.finished = False
        self.error = ""
        self.begun = threading.Event()

    def run(self) -> None:
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": self._prompt}],
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        try:
            with httpx.stream(
                "POST",
                f"{self._url}/v1/chat/completions",
                json=body,
                headers=IN_TURN,
                timeout=60,
            ) as answer:
                assert answer.status_code == 200, answer.read()
                self.worker = answer.headers["x-headwater-worker"]
                for line in answer.iter_lines():
                    self._take(line)
        except (httpx.HTTPError, AssertionError) as error:
            self.error = repr(error)
        self.begun.set()

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.finished = not self.error
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                self.error = str(event["error"]["message"])
                return
            self.text += event["choices"][0]["delta"].get("content") or ""
            if self.text:
                self.begun.set()

    def on(self, container: str) -> bool:
        """Whether the worker that answers is this container: its name begins with the host's."""
        host = self.worker.partition(":")[0]
        return bool(host) and container.startswith(host)


def streams(project: Project, number: int, max_tokens: int) -> list[Stream]:
    """So many streams of prompts that share nothing, all of them past their first token."""
    begun = [Stream(project, f"{uuid.uuid4()} and so on", max_tokens) for _ in range(number)]
    for one in begun:
        one.start()
    for one in begun:
        assert one.begun.wait(60), "a stream never began"
    return begun


def streams_on(project: Project, workers: Collection[str], max_tokens: int) -> list[Stream]:
    """Streams of which each of these workers answers one at least."""
    begun: list[Stream] = []
    while missing := set(workers) - {one.worker for one in begun}:
        assert len(begun) < 16 * len(workers), f"nothing is asked of {missing}"
        begun += streams(project, 2, max_tokens)
    return begun


def whole(ended: Sequence[Stream]) -> list[str]:
    """What is wrong with streams that should have been answered to the end; empty: nothing."""
    for one in ended:
        one.join(120)
    return [f"{one.worker}: {one.error or 'cut off'}" for one in ended if not one.finished]
