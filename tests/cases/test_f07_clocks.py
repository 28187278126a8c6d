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
from redisload import body, exact, load
from rig import ask, eventually
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

    def start(shift: float, redis: str):
        port = pick_port()
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


def down(served, name: str) -> bool:
    """Whether a worker is out or gone."""
    found = [w for w in served.gateway.router.workers(0.0) if str(w.id) == name]
    return not found or bool(found[0].reason)
