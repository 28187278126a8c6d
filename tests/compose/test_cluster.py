"""A cluster of fake workers, run for real, and everything that may happen to one.

The tests share the cluster and leave it with two workers; each says what must survive.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import httpx
import pytest
from composekit import Project, docker, streams, streams_on, wait_for, whole

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

WORKER = "worker-fake"
FILES = ("compose.yaml", "tests/compose/spread.yaml")
LONG = 1500
"""Tokens of a stream that lasts longer than what is done to the cluster meanwhile: some 8 s."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Project]:
    project = Project("fake", FILES, {"HEADWATER_IMAGE": "headwater-test:one"})
    try:
        project.compose("build")
        project.up()
        project.wait_for_workers(2)
        yield project
    finally:
        project.down()


def container_of(project: Project, worker: str) -> str:
    host = worker.partition(":")[0]
    return next(one for one in project.containers(WORKER) if one.startswith(host))


def test_scaling_adds_workers_beside_running_streams(cluster: Project) -> None:
    running = streams(cluster, 4, LONG)
    before = set(cluster.containers(WORKER))
    cluster.up("--no-recreate", "--scale", f"{WORKER}=4", WORKER)
    workers = cluster.wait_for_workers(4)
    assert whole(running) == []
    assert before < set(cluster.containers(WORKER))
    running = streams_on(cluster, workers, LONG // 2)
    cluster.up("--no-recreate", "--scale", f"{WORKER}=2", WORKER)
    # those that went had time to finish what they were answering
    assert whole(running) == []
    cluster.wait_for_workers(2)


def test_a_killed_worker_costs_its_own_streams_and_comes_back(cluster: Project) -> None:
    running = streams_on(cluster, cluster.wait_for_workers(2), LONG)
    victim = container_of(cluster, running[0].worker)
    os.kill(int(docker("inspect", "-f", "{{.State.Pid}}", victim)), 9)
    for number in range(10):
        cluster.ask(f"Question {number}")
    lost = [one for one in running if one.on(victim)]
    assert whole([one for one in running if one not in lost]) == []
    # a byte of their answers had reached the client: they end with an error, and say so
    assert len(whole(lost)) == len(lost)
    assert all(one.error for one in lost)
    cluster.wait_for_workers(2)


def test_a_paused_worker_is_routed_around(cluster: Project) -> None:
    victim, other = cluster.containers(WORKER)
    docker("pause", victim)
    try:
        # the first may go to the one that hangs, and are asked of the other when that is noticed
        for number in range(10):
            answer = cluster.ask(f"While one hangs: {number}")
            assert other.startswith(answer.headers["x-headwater-worker"].partition(":")[0])
    finally:
        docker("unpause", victim)
    cluster.wait_for_workers(2)


def test_a_stream_outlives_a_pause_of_its_worker(cluster: Project) -> None:
    running = streams(cluster, 2, 400)
    victim = container_of(cluster, running[0].worker)
    docker("pause", victim)
    time.sleep(3)
    docker("unpause", victim)
    assert whole(running) == []
    cluster.wait_for_workers(2)


def test_a_worker_behind_a_partition_is_routed_around(cluster: Project) -> None:
    running = streams(cluster, 4, LONG)
    victim, other = cluster.containers(WORKER)
    docker("network", "disconnect", f"{cluster.name}_default", victim)
    try:
        for number in range(10):
            answer = cluster.ask(f"While one is away: {number}")
            assert other.startswith(answer.headers["x-headwater-worker"].partition(":")[0])
        assert whole([one for one in running if one.on(other)]) == []
    finally:
        docker("network", "connect", f"{cluster.name}_default", victim)
    cluster.wait_for_workers(2)


def test_without_redis_everything_goes_on_and_heals(cluster: Project) -> None:
    prompt = "A long story about a river and its mill. " * 30
    running = streams(cluster, 2, LONG)
    cluster.compose("stop", "redis")
    assert whole(running) == []
    cluster.ask(prompt)
    wait_for("caches are known without it", lambda: _known(cluster.ask(prompt)), 20)
    assert len(cluster.served_by(8)) == 2
    wait_for("redis is missed", lambda: cluster.metrics()["headwater_redis_up"] == 0)
    cluster.up()
    wait_for("redis is back", lambda: cluster.metrics()["headwater_redis_up"] == 1)
    cluster.wait_for_workers(2)
    # what was cached before is known in the new, empty Redis: a gateway that starts now finds it
    cluster.compose("restart", "gateway")
    wait_for("the gateway is ready", lambda: _ready(cluster))
    cluster.wait_for_workers(2)
    assert _known(cluster.ask(prompt))


def _known(answer: httpx.Response) -> bool:
    """The gateway expected cached tokens, and the worker had them."""
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.headers["x-headwater-matched-tokens"]) > 0 and cached > 0


def _ready(project: Project) -> bool:
    try:
        return httpx.get(f"{project.url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_rolling_update_loses_no_stream(cluster: Project) -> None:
    old, gateway = cluster.containers(WORKER), cluster.containers("gateway")
    running = streams(cluster, 6, LONG // 2)
    cluster.env["HEADWATER_IMAGE"] = "headwater-test:two"
    cluster.compose("build")
    # new workers beside the old ones, then the old ones leave
    cluster.up("--no-deps", "--no-recreate", "--scale", f"{WORKER}=4", WORKER)
    running += streams_on(cluster, cluster.wait_for_workers(4), LONG // 2)
    docker("stop", "--time", "40", *old)
    assert whole(running) == []
    docker("rm", *old)
    # and the one gateway: who is being answered is answered to the end
    running = streams(cluster, 4, LONG // 2)
    cluster.compose("up", "-d", "--no-deps", "--wait", "gateway")
    assert whole(running) == []
    cluster.wait_for_workers(2)
    images = {
        docker("inspect", "-f", "{{.Config.Image}}", one)
        for one in [*cluster.containers(WORKER), *cluster.containers("gateway")]
    }
    assert images == {"headwater-test:two"}
    assert not set(gateway) & set(cluster.containers("gateway"))


def test_down_is_clean(cluster: Project) -> None:
    running = streams(cluster, 2, LONG // 2)
    cluster.compose("stop", "gateway")
    assert whole(running) == []
    cluster.compose("stop")
    states = [
        json.loads(line)
        for line in cluster.compose("ps", "-a", "--format", "json").split("\n")
        if line
    ]
    assert {one["Service"]: one["ExitCode"] for one in states} == {
        "gateway": 0,
        "redis": 0,
        WORKER: 0,
    }
    cluster.down()
    for kind in ("container", "volume", "network"):
        found = docker(
            kind, "ls", "-q", "--filter", f"label=com.docker.compose.project={cluster.name}"
        )
        assert found == "", kind
