"""The cluster that `docker compose up --build` starts: a real model on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from composekit import Project, docker, wait_for

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Project]:
    project = Project("cpu", ("compose.yaml", "tests/compose/spread.yaml"))
    try:
        project.compose("build")
        project.up()
        yield project
    finally:
        project.down()


def test_the_second_turn_hits_the_cache_and_a_dead_worker_is_survived(cluster: Project) -> None:
    model = cluster.model()
    messages = [{"role": "user", "content": "Tell me about rivers. " * 20}]
    first = cluster.chat(messages, model)
    said = first.json()["choices"][0]["message"]["content"]
    messages += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And lakes?"},
    ]
    second = cluster.chat(messages, model)
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second.headers["x-headwater-worker"] == first.headers["x-headwater-worker"]

    victim = cluster.containers("worker")[0]
    os.kill(int(docker("inspect", "-f", "{{.State.Pid}}", victim)), 9)
    for number in range(4):
        cluster.ask(f"Question {number}", model)
    cluster.wait_for_workers(2, model)


def test_the_report_is_where_the_page_says(cluster: Project) -> None:
    cluster.ask("Once more", cluster.model())
    wait_for(
        "requests are recorded",
        lambda: "prompt tokens" in cluster.compose("exec", "-T", "gateway", "headwater", "report"),
    )
