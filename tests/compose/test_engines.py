"""compose.vllm.yaml with its engines played: found by one name, known from their events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from composekit import Project, wait_for

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

READ = (
    "import urllib.request as u; "
    "print(u.urlopen('http://127.0.0.1:8001/admin/workers', timeout=5).read().decode())"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Project]:
    files = ("compose.yaml", "compose.vllm.yaml", "tests/compose/emulated.yaml")
    project = Project("gpu2", files)
    try:
        project.compose("build", "gateway")
        project.up()
        yield project
    finally:
        project.down()


def workers(project: Project) -> list[dict[str, Any]]:
    text = project.compose("exec", "-T", "gateway", "python", "-c", READ)
    return list(json.loads(text)["workers"])


def test_both_engines_are_found_and_believed(cluster: Project) -> None:
    def exact() -> list[dict[str, Any]]:
        found = workers(cluster)
        good = len(found) == 2 and all(one["trust"] == "exact" for one in found)
        return found if good else []

    found = wait_for("two engines are exact", exact)
    assert all("dns" in one["sources"] for one in found)


def test_what_an_engine_holds_is_known_to_the_token(cluster: Project) -> None:
    text = f"{uuid.uuid4()} is how it begins. " * 30
    first = cluster.ask(text, "emulated")
    again = wait_for(
        "its events are known",
        lambda: _matched(cluster.ask(text, "emulated")),
    )
    worker, matched, cached = again
    assert worker == first.headers["x-headwater-worker"]
    assert matched == cached > 100


def _matched(answer: Any) -> tuple[str, int, int] | None:
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    matched = int(answer.headers["x-headwater-matched-tokens"])
    return (answer.headers["x-headwater-worker"], matched, cached) if matched else None
