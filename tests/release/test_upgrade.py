"""Two versions beside each other on one Redis, and one replaced by the other: docs/upgrading.md."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from composekit import free_port, wait_for
from conftest import RedisServer
from releasekit import ROOT, Served, cached, environment, run, serving

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]

NEW = [sys.executable, "-P", "-c", "import shared.cli; shared.cli.main()"]
EARLIER = {
    "first": "6d6bd0d",
    "unnumbered": "bafee65",
}
"""Of the first form in Redis (no adapters, one tier), and the last that told no schema number."""


@pytest.fixture(scope="module", params=EARLIER)
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an earlier version, from this repository's history."""
    folder = tmp_path_factory.mktemp(request.param)
    run("git", "archive", "-o", folder / "source.tar", EARLIER[request.param])
    (folder / "source").mkdir()
    run("tar", "-xf", folder / "source.tar", "-C", folder / "source")
    return environment(folder / "env", folder / "source") / "headwater"


class Pair:
    """A worker and a gateway of the earlier version, and one each of this one."""

    def __init__(self, stack: ExitStack, folder: Path, earlier: Path, redis: str) -> None:
        here = {"PYTHONPATH": str(ROOT)}
        ports = {name: free_port() for name in ("old", "new")}
        self.workers: dict[str, Served] = {}
        self.gateways: dict[str, Served] = {}
        for name, command, env in (("old", [earlier], {}), ("new", NEW, here)):
            shared_flags = ["--port", "{port}", "--redis", redis]
            worker = [*command, "worker", "--model", "fake", "--served-model-name", "fake"]
            self.workers[name] = stack.enter_context(
                serving(folder / f"{name}-w", *worker, *shared_flags, port=ports[name], env=env)
            )
            gateway = [*command, "gateway", "--admin-port", "0"]
            self.gateways[name] = stack.enter_context(
                serving(folder / f"{name}-g", *gateway, *shared_flags, env=env)
            )
        self.named = {f"127.0.0.1:{port}": name for name, port in ports.items()}

    def ask(self, gateway: str, text: str) -> tuple[str, httpx.Response]:
        """Which version's worker answered, and its answer."""
        answer = self.gateways[gateway].ask(text)
        return self.named[answer.headers["x-headwater-worker"]], answer

    def wait_until_both_are_known(self) -> None:
        for gateway in self.gateways:
            wait_for(
                f"the {gateway} gateway asks both workers",
                lambda g=gateway: (
                    {self.ask(g, str(uuid.uuid4()))[0] for _ in range(6)} == {"old", "new"}
                ),
            )


def found_elsewhere(pair: Pair, told: str, asked: str, worker: str) -> bool:
    """A prompt that one gateway sent to a worker is found there by the other."""
    text = f"{uuid.uuid4()} is the beginning of what is said over and over. " * 12
    went, first = pair.ask(told, text)
    if went != worker or cached(first):
        return False

    def look() -> bool:
        again, second = pair.ask(asked, text)
        assert again == worker
        return int(second.headers["x-headwater-matched-tokens"]) > 100 and cached(second) > 100

    return wait_for(f"{asked} finds on {worker} what {told} sent there", look, 10)


def test_versions_share_what_workers_hold_and_one_replaces_the_other(
    earlier: Path, tmp_path: Path, redis_server_factory: Callable[..., RedisServer]
) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, earlier, redis_server_factory().url)
        pair.wait_until_both_are_known()
        for told, asked in (("old", "new"), ("new", "old")):
            for worker in ("old", "new"):
                wait_for(
                    f"a prompt goes from the {told} gateway to the {worker} worker",
                    lambda t=told, a=asked, w=worker: found_elsewhere(pair, t, a, w),
                )
        replaced(pair)


def replaced(pair: Pair) -> None:
    """The old worker, then the old gateway leave while both gateways are asked: nobody notices."""
    stop, wrong = threading.Event(), list[str]()
    answered = {"old": 0, "new": 0}

    def keep_asking(gateway: str) -> None:
        while not stop.is_set():
            try:
                pair.ask(gateway, str(uuid.uuid4()))
                answered[gateway] += 1
            except (AssertionError, httpx.HTTPError) as error:
                wrong.append(f"{gateway}: {error!r}")
            stop.wait(0.02)

    asking = [threading.Thread(target=keep_asking, args=(name,)) for name in answered]
    for one in asking:
        one.start()
    wait_for("both are asked", lambda: min(answered.values()) > 20)
    assert pair.workers["old"].stop() == 0
    before = dict(answered)
    wait_for(
        "the new worker answers all", lambda: min(answered[n] - before[n] for n in before) > 20
    )
    stop.set()
    for one in asking:
        one.join()
    assert wrong == []
    assert pair.gateways["old"].stop() == 0
    assert pair.ask("new", "And on")[0] == "new"
