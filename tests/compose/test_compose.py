"""compose.yaml, built and run for real. Needs `docker compose`; `make test-compose` runs it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]


class Cluster:
    """One compose project of its own name and port."""

    def __init__(self, profile: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {
            "HEADWATER_APT_PACKAGES": "",  # base images of a test machine may be without apt
            **os.environ,
            "COMPOSE_PROFILES": profile,
            "COMPOSE_PROJECT_NAME": f"hwtest-{uuid.uuid4().hex[:8]}",
            "HEADWATER_PORT": str(self.port),
        }

    def compose(self, *arguments: str) -> str:
        done = subprocess.run(
            ["docker", "compose", *arguments],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=1500,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def chat(
        self, messages: list[dict[str, str]], model: str, max_tokens: int = 8
    ) -> httpx.Response:
        answer = httpx.post(
            f"{self.url}/v1/chat/completions",
            json={"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return answer

    def model(self) -> str:
        return str(httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"][0]["id"])


@pytest.fixture(params=["fake", "cpu"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    up = Cluster(request.param)
    try:
        try:
            up.compose("up", "--build", "-d", "--wait", "--wait-timeout", "600")
        except AssertionError as error:
            error.add_note(up.compose("ps", "-a") + up.compose("logs", "--tail", "40"))
            raise
        yield up
    finally:
        up.compose("down", "-v", "--timeout", "10")


def test_second_turn_hits_the_cache_and_a_dead_worker_is_survived(cluster: Cluster) -> None:
    model = cluster.model()
    messages = [{"role": "user", "content": "Tell me about rivers. " * 20}]
    first = cluster.chat(messages, model)
    messages += [
        {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And lakes?"},
    ]
    second = cluster.chat(messages, model)
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second.headers["x-headwater-worker"] == first.headers["x-headwater-worker"]

    # one worker is killed from outside: requests go on, and it comes back by itself
    service = "worker-fake" if "fake" in cluster.env["COMPOSE_PROFILES"] else "worker"
    listing = [json.loads(line) for line in cluster.compose("ps", "--format", "json").splitlines()]
    victim = next(entry["Name"] for entry in listing if entry["Service"] == service)
    pid = subprocess.run(
        ["docker", "inspect", "-f", "{{.State.Pid}}", victim],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    os.kill(int(pid), 9)
    for number in range(10):
        cluster.chat([{"role": "user", "content": f"Question {number}"}], model, max_tokens=2)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        seen = {
            cluster.chat(
                [{"role": "user", "content": f"Hello {uuid.uuid4()}"}], model, max_tokens=1
            ).headers["x-headwater-worker"]
            for _ in range(4)
        }
        if len(seen) == 2:
            return
        time.sleep(1)
    pytest.fail("the killed worker never served again")


def test_the_file_is_valid() -> None:
    Cluster("cpu").compose("config", "-q")
