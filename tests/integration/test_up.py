"""``headwater up --fake`` as a user starts it: what is printed, what runs, what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from ports import pick_row
from stopwatch import Stopwatch
from uprig import HEADWATER, Up, ready_workers, until

from gateway.cluster.plan import ClusterOptions
from gateway.cluster.status import until_whole
from gateway.cluster.supervisor import Supervisor


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    running: list[Up] = []

    def make(*flags: str, **options: int) -> Up:
        up = Up(tmp_path, *flags, **options)
        running.append(up)
        up.await_line("ready ")
        return up

    yield make
    for up in running:
        up.end()


def test_ready_line_then_a_request_is_served_and_sigterm_leaves_nothing(
    start: Callable[..., Up],
) -> None:
    up = start()
    assert up.lines[-1] == f"ready {up.url}"
    assert up.chat("hello").status_code == 200
    tree = psutil.Process(up.process.pid).children(recursive=True)
    assert len(tree) == 4  # Redis, two workers, a gateway
    assert up.end() == 0
    assert [child for child in tree if child.is_running()] == []


@pytest.mark.parametrize("redis", ["auto", "none"])
def test_a_burst_right_behind_the_ready_line_uses_all_workers(
    start: Callable[..., Up], redis: str
) -> None:
    up = start("--redis", redis, workers=2)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(up.chat, (f"burst, request {n}" for n in range(20))))
    used = {answer.headers["x-headwater-worker"] for answer in answers}
    assert len(used) == 2


def test_the_ready_line_waits_only_so_long_for_workers_that_do_not_come() -> None:
    options = ClusterOptions(
        workers=2, gateways=2, port=pick_row(40), model="", policy=None, fake=True, threads=1
    )
    begun, watch = time.monotonic(), Stopwatch()
    asyncio.run(until_whole(options, Supervisor(print), 0.5))
    assert time.monotonic() - begun > 0.4
    assert watch.seconds() < 10


def test_kill_nine_of_the_parent_leaves_no_orphan(start: Callable[..., Up]) -> None:
    up = start()
    tree = psutil.Process(up.process.pid).children(recursive=True)
    up.process.kill()
    up.process.wait(10)
    _, alive = psutil.wait_procs(tree, timeout=10)
    assert alive == []


def test_a_status_line_per_worker_follows(start: Callable[..., Up]) -> None:
    up = start("--redis", "none")
    line = up.await_line("worker ")
    assert "trust" in line
    assert "requests" in line


def test_second_turn_hits_the_cache_without_redis_too(start: Callable[..., Up]) -> None:
    up = start("--redis", "none")
    until(lambda: ready_workers(up) == 2)
    first = up.chat("tell me about rivers " * 20)
    second = up.chat("tell me about rivers " * 20)
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second.headers["x-headwater-worker"] == first.headers["x-headwater-worker"]


def test_a_worker_killed_idle_is_reported_restarted_and_starts_empty(
    start: Callable[..., Up],
) -> None:
    up = start()
    until(lambda: ready_workers(up) == 2)
    text = "a long enough prompt to fill some blocks " * 5
    holder = up.chat(text).headers["x-headwater-worker"]
    port = holder.rpartition(":")[2]
    victim = up.children(f"-m worker --port {port}")[0]
    victim.kill()
    up.await_line("worker ", 10)
    for number in range(10):  # nobody sees it
        assert up.chat(f"question {number}").status_code == 200
    until(lambda: ready_workers(up) == 2)
    up.chat("warm up")
    again = up.chat(text)
    delivered = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    predicted = int(again.headers["x-headwater-matched-tokens"])
    assert predicted == delivered == 0 or again.headers["x-headwater-worker"] != holder


def test_a_worker_killed_in_a_stream_ends_it_with_an_error_event(start: Callable[..., Up]) -> None:
    up = start()
    until(lambda: ready_workers(up) == 2)
    body = {
        "model": "fake",
        "max_tokens": 2000,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "go on"}],
    }
    events = []
    with httpx.stream("POST", f"{up.url}/v1/chat/completions", json=body, timeout=30) as answer:
        port = answer.headers["x-headwater-worker"].rpartition(":")[2]
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            events.append(line[6:])
            if len(events) == 5:
                up.children(f"-m worker --port {port}")[0].kill()
    assert "error" in json.loads(events[-1])
    assert "[DONE]" not in events
    assert up.chat("next").status_code == 200
    until(lambda: ready_workers(up) == 2)


def test_a_redis_that_was_named_and_is_dead_is_told(start: Callable[..., Up]) -> None:
    up = start("--redis", "redis://user:secret@127.0.0.1:9/0")
    [warning] = [line for line in up.lines if line.startswith("warning: ")]
    assert "redis://***@127.0.0.1:9/0 does not answer" in warning
    assert "secret" not in warning
    assert up.chat("hello").status_code == 200


def test_redis_killed_costs_no_request_and_comes_back(start: Callable[..., Up]) -> None:
    up = start()
    until(lambda: ready_workers(up) == 2)
    until(lambda: all(entry["trust"] == "exact" for entry in up.workers()))
    text = "something that both know " * 10
    before = up.chat(text)
    up.children("-server")[0].kill()
    for _ in range(10):
        answer = up.chat(text)
        assert answer.status_code == 200
        assert answer.headers["x-headwater-worker"] == before.headers["x-headwater-worker"]
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    until(lambda: len(up.children("-server")) == 1)
    metrics = up.admin + "/metrics"
    until(lambda: "headwater_redis_up 1.0" in httpx.get(metrics).text)
    until(lambda: all(entry["trust"] == "exact" for entry in up.workers()))


def test_a_gateway_killed_is_restarted_and_knows_the_caches(start: Callable[..., Up]) -> None:
    up = start()
    until(lambda: ready_workers(up) == 2)
    text = "remember this across the gateway's death " * 5
    first = up.chat(text)
    up.children(f"-m gateway --port {up.port}")[0].kill()

    def answers() -> bool:
        ready = httpx.get(f"{up.url}/ready", timeout=2)  # notes: the tokenizer is being loaded
        return ready.status_code == 200 and not ready.json()["notes"]

    until(answers)
    until(lambda: all(entry["trust"] == "exact" for entry in up.workers()))
    again = up.chat(text)
    assert again.headers["x-headwater-worker"] == first.headers["x-headwater-worker"]
    assert int(again.headers["x-headwater-matched-tokens"]) > 0


def test_two_gateways_share_what_one_of_them_warmed(start: Callable[..., Up]) -> None:
    up = start(gateways=2)
    other = f"http://127.0.0.1:{up.port + 10}"
    until(lambda: ready_workers(up) == 2)
    until(lambda: httpx.get(f"{other}/ready", timeout=2).status_code == 200)
    for number in range(20):
        text = f"{number} is a prompt that is warmed through one gateway " * 4
        first = up.chat(text)

        def known(text: str = text) -> bool:
            body = {"model": "fake", "messages": [{"role": "user", "content": text}]}
            answer = httpx.post(
                f"http://127.0.0.1:{up.port + 11}/admin/explain", json=body, timeout=5
            )
            return any(worker["matched_tokens"] > 0 for worker in answer.json()["workers"])

        until(known)
        second = up.chat(text, other)
        assert second.headers["x-headwater-worker"] == first.headers["x-headwater-worker"]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_taken_port_is_one_line_and_exit_code_two() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [HEADWATER, "up", "--fake", "--port", str(taken.getsockname()[1])],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--port" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--port", "65000", "--gateways", "60"), "--port: 65540"),
        (("--port", "20000", "--worker-port", "20000"), "--worker-port: 20000"),
        (("--workers", "0"), "headwater up --help"),
    ],
)
def test_impossible_flags_are_one_line_and_exit_code_two(
    flags: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [HEADWATER, "up", "--fake", *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert said in done.stderr
    assert done.stdout == ""
