"""F07: nobody is judged by comparing two machines' clocks.

E runs ten minutes ahead, E2 ten minutes behind, and the gateway's own clock jumps by an hour to and
fro under load. Scaled: more than a lease instead of an hour of watching.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conftest import FAST_FAKE, end_process, pick_port
from redisload import await_known, body, exact, load, placed
from rig import CHAT, ask, eventually
from stopwatch import Stopwatch

pytestmark = pytest.mark.redis

SHIFTED = """
import runpy, sys, time
real = time.time
time.time = lambda: real() + {shift}
sys.argv = ["headwater-worker", *sys.argv[1:]]
runpy.run_module("worker", run_name="__main__", alter_sys=False)
"""


@pytest.fixture
def shifted(tmp_path) -> Iterator:
    """``shifted(seconds, redis)``: a worker whose wall clock is off; returns (process, name)."""
    import os

    processes = []

    def start(shift: float, redis: str, port: int = 0):
        port = port or pick_port()
        flags = ["--model", "fake", "--port", str(port), "--admin-port", str(pick_port())]
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", SHIFTED.format(shift=shift), *flags, "--redis", redis],
            env={**os.environ, **FAST_FAKE},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        processes.append(process)
        return process, f"127.0.0.1:{port}"

    yield start
    for process in processes:
        end_process(process)


async def test_clocks_that_disagree(serve, shifted, redis_server_factory, monkeypatch) -> None:
    server = redis_server_factory("newest")
    (_, first), (second, name) = shifted(600, server.url), shifted(-600, server.url)
    patient = {"redis.timeout_ms": 10_000}  # a busy machine is no outage
    served = await serve(wait=False, **{"redis.url": server.url}, **patient)
    await eventually(exact(served, 2), 30)
    real, stats, lags = time.time, served.gateway.feeds.stats, []
    async with load(served.url, lambda n: body(f"F07 {n}"), per_s=20) as requests:
        for jump in (3600, -3600, 0):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            for _ in range(20):
                await asyncio.sleep(0.1)
                lags.append(stats.index_lag_s)
                assert exact(served, 2)()
        monkeypatch.undo()
    requests.check()
    assert 0 <= min(lags) <= max(lags) < 30
    metrics = (await ask(served.admin, "/metrics")).body.decode()
    for line in metrics.splitlines():
        label, _, value = line.rpartition(" ")
        if "seconds" in label and not label.startswith("#") and "_time_seconds" not in label:
            assert 0 <= float(value) < 1800, line
    epochs = {str(w.id): w.epoch for w in served.gateway.router.workers(0.0)}
    assert epochs[first] >> 16 > epochs[name] >> 16
    # A worker that is really dead is found as fast as ever.
    second.kill()
    begun = Stopwatch()
    await eventually(lambda: not exact(served, 2)() or down(served, name), 5)
    await eventually(lambda: down(served, name), 5)
    assert begun.seconds() < 5


@pytest.mark.parametrize("road", ["redis", "http"])
async def test_a_worker_that_comes_back_with_its_clock_set_back(
    serve, shifted, redis_server_factory, road: str
) -> None:
    """Its epoch is lower than the one before, and yet it is the later one."""
    url = redis_server_factory("newest").url if road == "redis" else "none"
    first, name = shifted(3600, url)
    listed = {} if road == "redis" else {"workers.urls": f"http://{name}"}
    served = await serve(wait=False, **{"redis.url": url, "redis.timeout_ms": 10_000}, **listed)
    await eventually(exact(served, 1, ""), 30)
    assert placed(await ask(served.url, CHAT, body("F07 before")))[2] == 0
    await await_known(served, "F07 before", name)
    before = served.gateway.router.workers(0.0)[0].epoch
    first.kill()
    first.wait()
    shifted(-3600, url, int(name.rpartition(":")[2]))
    await eventually(lambda: again(served, before), 30)
    assert served.gateway.router.workers(0.0)[0].epoch < before
    _, matched, cached = placed(await ask(served.url, CHAT, body("F07 before")))
    assert (matched, cached) == (0, 0)
    # Not through the gateway: it learns of it from what the worker tells.
    assert (await ask(f"http://{name}", CHAT, body("F07 after"))).status == 200
    await await_known(served, "F07 after", name)
    _, matched, cached = placed(await ask(served.url, CHAT, body("F07 after")))
    assert matched == cached > 0


def again(served, before: int) -> bool:
    """Whether another incarnation is there, and known exactly."""
    return exact(served, 1, "")() and served.gateway.router.workers(0.0)[0].epoch != before


def down(served, name: str) -> bool:
    """Whether a worker is out or gone."""
    found = [w for w in served.gateway.router.workers(0.0) if str(w.id) == name]
    return not found or bool(found[0].reason)
