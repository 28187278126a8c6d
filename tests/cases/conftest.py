"""Fixtures of the cases: those of the integration tests, and gateways and workers as processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from caserig import GatewayLauncher
from conftest import RedisServer, WorkerLauncher, WorkerProcess, pick_port
from integration.conftest import dial, log, serve, stub

__all__ = ["dial", "log", "serve", "stub"]

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_d0*.py", "test_a02*.py", "test_a03*.py"]

MODELLED = {
    "HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "50",
    "HEADWATER_FAKE__DECODE_MS_PER_STEP": "0.5",
    "HEADWATER_CACHE__KV_BLOCKS": "8192",
}


@pytest.fixture
def gateway_process(tmp_path: Path) -> Iterator[GatewayLauncher]:
    """``gateway_process(worker_url, ..., redis="none", env={})`` starts one more gateway."""
    launcher = GatewayLauncher(tmp_path, pick_port)
    yield launcher
    launcher.end()


@dataclass(frozen=True)
class Pair:
    """Two workers of our own without torch, and the Redis that they publish to."""

    redis: RedisServer
    workers: tuple[WorkerProcess, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        """Their addresses."""
        return tuple(worker.url for worker in self.workers)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """E and E2 with R, for all tests of the session: each uses prompts of its own."""
    folder = tmp_path_factory.mktemp("pair")
    redis = RedisServer("newest", folder)
    redis.start()
    launcher = WorkerLauncher(folder)
    for seed in ("3", "4"):
        env = {**MODELLED, "PYTHONHASHSEED": seed}
        launcher("--redis", redis.url, env=env, wait=False)
    for worker in launcher.workers:
        worker.await_ready()
    yield Pair(redis, tuple(launcher.workers))
    launcher.end()
    redis.stop()


@pytest.fixture(scope="session")
def torch_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """E with a real model over bytes, float32, a pool of 64 blocks and steps of 64 tokens."""
    from casemodel import byte_model

    folder = tmp_path_factory.mktemp("torch")
    launcher = WorkerLauncher(folder)
    flags = ("--threads", "1", "--kv-blocks", "64", "--max-batch-tokens", "64")
    made = launcher(
        "--model", str(byte_model(folder / "bytes")), "--served-model-name", "fake", *flags
    )
    yield made
    launcher.end()


@pytest.fixture(scope="session", params=["merges", "fallback"])
def spelling_worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """E over merged bytes, and over words with bytes to fall back to."""
    from casemodel import fallback_model, merging_model

    folder = tmp_path_factory.mktemp("spelling")
    make = {"merges": merging_model, "fallback": fallback_model}[request.param]
    launcher = WorkerLauncher(folder)
    flags = ("--served-model-name", "fake", "--threads", "1", "--kv-blocks", "512")
    yield launcher("--model", str(make(folder / "model")), *flags)
    launcher.end()


@pytest.fixture(scope="module")
def module_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayLauncher]:
    """Starts gateways that all tests of a module use."""
    launcher = GatewayLauncher(tmp_path_factory.mktemp("gateway"), pick_port)
    yield launcher
    launcher.end()


@pytest.fixture(scope="session")
def end_worker() -> Callable[[WorkerProcess], None]:
    """``kill -9`` and wait."""

    def end(worker: WorkerProcess) -> None:
        worker.process.kill()
        worker.process.wait()

    return end
