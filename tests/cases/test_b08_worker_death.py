"""B08: what the index believed of a worker dies with the worker.

Scaled: 5 restarts with Redis and 1 without instead of 20; 50 prefixes as in the case. E is reached
by a second model name that only it answers to.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from caserig import GatewayProcess, wait_until
from conftest import WorkerProcess
from rig import CHAT

BLOCK = 16
MODELLED = {
    # 20 ms a prompt: what a busy machine adds must not look like one worker being the slower one
    "HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "100",
    "HEADWATER_FAKE__DECODE_MS_PER_STEP": "0.2",
    "HEADWATER_CACHE__KV_BLOCKS": "4096",
}
HEALTH_PERIOD_S = 0.2 + 5.0
"""Interval and time limit of probes, as set for the gateways of these tests."""


@dataclass
class Cluster:
    """E, which dies again and again, E2 and G."""

    launch: Callable[..., WorkerProcess]
    redis: str
    one: WorkerProcess
    gateway: GatewayProcess
    flags: tuple[str, ...] = ()
    texts: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """E as the gateway calls it."""
        return self.one.url.removeprefix("http://")

    def die(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End E."""
        self.one.process.send_signal(how)
        self.one.process.wait(20)

    def restart(self, *flags: str) -> None:
        """E again, on the same address; returns when the gateway may use it."""
        before = self.gateway.worker(self.name)["epoch"] if self.listed() else 0
        ports = ("--port", port_of(self.one.url), "--admin-port", port_of(self.one.admin_url))
        names = ("--served-model-name", "fake", "--served-model-name", "only-e")
        made = self.launch("--redis", self.redis, *names, *ports, *flags, env=MODELLED)
        self.one = replace(made, url=self.one.url, admin_url=self.one.admin_url)
        wait_until(lambda: self.is_new(before), HEALTH_PERIOD_S + 1.0)

    def restart_between(self, start: Callable[[], GatewayProcess]) -> None:
        """E is warm, dies, and another gateway begins before it is back."""
        self.die()
        self.restart()
        self.warm()
        self.die()
        self.gateway = start()
        self.restart()

    def listed(self) -> bool:
        """Whether the gateway knows of E at all."""
        return any(each["id"] == self.name for each in self.gateway.workers())

    def is_new(self, before: int) -> bool:
        """Whether the gateway has met the new incarnation."""
        if not self.listed():
            return False
        known = self.gateway.worker(self.name)
        return bool(known["epoch"] != before and known["state"] == "ready")

    def ask(self, text: str, model: str = "fake") -> tuple[str, int, int]:
        """Worker, predicted and reported reuse."""
        answer = self.gateway.http.post(self.gateway.url + CHAT, json=body(text, model))
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        matched = int(answer.headers["x-headwater-matched-tokens"])
        return answer.headers["x-headwater-worker"], matched, cached

    def warm(self) -> None:
        """50 prefixes on E, and the index knows them."""
        for text in self.texts:
            assert self.ask(text, "only-e")[0] == self.name
        for text in self.texts:
            wait_until(lambda text=text: self.believed(text) >= 200)

    def believed(self, text: str) -> int:
        """Tokens of a prompt that the gateway thinks E holds."""
        return self.gateway.explain(body(text)).get(self.name, 0)

    def nothing_believed(self) -> None:
        """E is empty, as far as the gateway knows."""
        assert [self.believed(text) for text in self.texts] == [0] * len(self.texts)
        assert self.gateway.worker(self.name)["index_blocks"] == 0

    def served_as_new(self) -> None:
        """Placement by load, then by what is really there; predictions hold."""
        first = [self.ask(text) for text in self.texts]
        on_e = sum(worker == self.name for worker, _, _ in first)
        assert 10 <= on_e <= 40
        for worker, matched, cached in first:
            assert abs(matched - cached) <= BLOCK
            assert cached == 0 or worker != self.name
        again = [self.ask(text) for text in self.texts]
        assert [worker for worker, _, _ in again] == [worker for worker, _, _ in first]
        assert all(abs(matched - cached) <= BLOCK for _, matched, cached in again)
        assert all(cached >= 200 for _, _, cached in again)


def port_of(url: str) -> str:
    """The port in a base URL."""
    return url.rpartition(":")[2]


def body(text: str, model: str = "fake") -> dict[str, Any]:
    """A greedy chat."""
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}


def texts(seed: object, n: int = 50) -> list[str]:
    """Prompts of some 220 tokens that share nothing but the template's first words."""
    rng = random.Random(str(seed))
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=220)) for _ in range(n)]


@pytest.fixture
def cluster(worker_process, gateway_process, redis_server_factory) -> Callable[..., Cluster]:
    """``cluster(with_redis)`` starts one."""

    def make(with_redis: bool, *flags: str) -> Cluster:
        redis = redis_server_factory().url if with_redis else "none"
        names = ("--served-model-name", "fake", "--served-model-name", "only-e")
        one = worker_process("--redis", redis, *names, *flags, env=MODELLED, wait=False)
        two = worker_process("--redis", redis, env=MODELLED, wait=False)
        one.await_ready()
        two.await_ready()
        urls = () if with_redis else (one.url, two.url)
        gateway = gateway_process(*urls, redis=redis)
        gateway.await_exact(2)
        return Cluster(worker_process, redis, one, gateway, texts=texts(f"B08 {with_redis}"))

    return make


@pytest.mark.redis
@pytest.mark.parametrize(("with_redis", "restarts"), [(True, 3), (False, 1)])
def test_it_dies_and_starts_again(cluster, gateway_process, with_redis, restarts) -> None:
    """Once in good order, else killed."""
    e = cluster(with_redis)
    e.warm()
    sizes = [e.gateway.worker(e.name)["index_blocks"]]
    for turn in range(restarts):
        e.die(signal.SIGTERM if turn == 1 else signal.SIGKILL)
        e.restart()
        e.nothing_believed()
        if turn == 0:
            e.served_as_new()
        e.warm()
        sizes.append(e.gateway.worker(e.name)["index_blocks"])
    assert max(sizes) <= sizes[0] + 2, sizes
    if with_redis:
        as_another(e)
        # What a dead worker left in Redis is nothing to a gateway that comes late.
        e.restart_between(lambda: gateway_process(redis=e.redis))
        e.nothing_believed()
        e.texts = texts("late")
        e.served_as_new()


def as_another(e: Cluster) -> None:
    """It comes back with another block size, then without a cache: nothing old is believed."""
    e.die()
    e.restart("--block-size", "32")
    e.nothing_believed()
    for text in e.texts[:10]:
        e.ask(text, "only-e")
        worker, matched, cached = e.ask(text, "only-e")
        assert (worker, matched % 32, cached % 32) == (e.name, 0, 0)
        assert abs(matched - cached) <= 32
    e.die()
    e.restart("--no-prefix-cache")
    e.nothing_believed()
    for text in e.texts[:10]:
        e.ask(text, "only-e")
        assert e.ask(text, "only-e") == (e.name, 0, 0)
