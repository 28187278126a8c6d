"""B15: the gateway takes each worker's block size by itself; part of a block is worth nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from caserig import COMPLETIONS, GatewayLauncher, GatewayProcess, wait_until
from conftest import WorkerLauncher, pick_port

SIZES = (1, 16, 24, 32, 64)
QUICK_WORKER = {
    "HEADWATER_FAKE__PREFILL_US_PER_TOKEN": "20",
    "HEADWATER_FAKE__DECODE_MS_PER_STEP": "0.2",
}


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[GatewayProcess, dict[int, str]]]:
    """One gateway that was told nothing, and a worker of each block size."""
    folder = tmp_path_factory.mktemp("sizes")
    workers = WorkerLauncher(folder)
    for size in SIZES:
        names = ("--served-model-name", "fake", "--served-model-name", f"size-{size}")
        blocks = ("--block-size", str(size), "--kv-blocks", str(20_000 // size))
        workers(*blocks, *names, env=QUICK_WORKER, wait=False)
    for worker in workers.workers:
        worker.await_ready()
    gateways = GatewayLauncher(folder, pick_port)
    gateway = gateways(*(worker.url for worker in workers.workers))
    gateway.await_exact(len(SIZES), 30.0)
    ids = [worker.url.removeprefix("http://") for worker in workers.workers]
    yield gateway, dict(zip(SIZES, ids, strict=True))
    gateways.end()
    workers.end()


def text(seed: object, length: int) -> str:
    rng = random.Random(str(seed))
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz     ", k=length))


def complete(gateway: GatewayProcess, model: str, prompt: str) -> tuple[int, int, int]:
    """Tokens of the prompt, predicted and reported reuse."""
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    answer = gateway.http.post(gateway.url + COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    predicted = int(answer.headers["x-headwater-matched-tokens"])
    assert int(answer.headers["x-headwater-prompt-tokens"]) == usage["prompt_tokens"]
    return usage["prompt_tokens"], predicted, usage["prompt_tokens_details"]["cached_tokens"]


def believed(gateway: GatewayProcess, worker: str, prompt: str) -> int:
    return gateway.explain({"model": "fake", "prompt": prompt})[worker]


@pytest.mark.parametrize("size", SIZES)
def test_prediction_and_reuse_agree(fleet: Any, size: int) -> None:
    gateway, workers = fleet
    assert gateway.worker(workers[size])["block_size"] == size
    prompt, turns = text(size, 300), []
    for turn in range(4):
        turns.append(complete(gateway, f"size-{size}", prompt))
        least = len(prompt) - max(size, 48)
        wait_until(lambda p=prompt, n=least: believed(gateway, workers[size], p + "!") >= n)
        prompt += text((size, turn), 150)
    assert turns[0][1:] == (0, 0)
    for (before, _, _), (_, predicted, cached) in pairwise(turns):
        # Keys stand for 16 tokens, so with other sizes up to the next common multiple is not seen.
        slack = max(size, 16 if 16 % size == 0 else 48)
        assert before - slack <= predicted <= cached <= predicted + slack
        assert cached % size == 0


@pytest.mark.parametrize("size", [32, 64])
def test_part_of_a_larger_block_is_not_credited(fleet: Any, size: int) -> None:
    gateway, workers = fleet
    base = text(("part", size), 640)
    complete(gateway, f"size-{size}", base)
    wait_until(lambda: believed(gateway, workers[size], base + "!") == 640)
    for shared in (16, size - 16, size - 1, size, size + 16, 2 * size - 1, 2 * size, 200):
        prompt = base[:shared] + text(("other", size, shared), 640 - shared)
        expected = shared // size * size
        assert believed(gateway, workers[size], prompt) == expected, shared
    assert believed(gateway, workers[16], base + "!") == 0


def test_one_prompt_on_all_sizes_at_once(fleet: Any) -> None:
    """Each worker is credited what it can reuse of it, and the report agrees."""
    gateway, workers = fleet
    base = text("all", 500)
    for size in SIZES:
        complete(gateway, f"size-{size}", base)

    def settled() -> bool:
        known = gateway.explain({"model": "fake", "prompt": base + "!"})
        return all(known[workers[size]] >= 500 // size * size - max(size, 48) for size in SIZES)

    wait_until(settled)
    known = gateway.explain({"model": "fake", "prompt": base + "!"})
    for size in SIZES:
        cached = complete(gateway, f"size-{size}", base + "!")[2]
        assert known[workers[size]] <= cached, size


def test_the_folder_is_not_needed(tmp_path: Path) -> None:
    """A block size below 1 is refused by the worker itself."""
    from conftest import WorkerLauncher as Launch

    launcher = Launch(tmp_path)
    made = launcher("--block-size", "0", wait=False)
    assert made.process.wait(20) == 2
