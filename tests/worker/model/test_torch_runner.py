"""The runner as the engine sees it: plans in, tokens out, errors kept to the step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shared.errors import ConfigError
from worker.config import CacheConfig, ModelConfig
from worker.model import memory
from worker.model.batch import Layout, build_batch, chunked
from worker.model.kernels.base import Chunked
from worker.model.kvcache import KvPool, bytes_per_block
from worker.model.runner import TorchRunner
from worker.runner import Chunk, Runner, RunnerError, StepPlan
from worker.sequence import SamplingParams

pytestmark = pytest.mark.torch


@pytest.fixture
def folder(
    tmp_path: Path, config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> Path:
    """A saved tiny llama."""
    model_of(config_of_kind("llama"), torch.float32).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_load(folder: Path) -> None:
    config = ModelConfig(path=str(folder), device="cpu", threads=1, max_model_len=300)
    runner: Runner = TorchRunner.load(config, CacheConfig(kv_blocks=9, block_size=5))
    assert (runner.n_blocks, runner.block_size) == (9, 5)
    assert (runner.max_model_len, runner.vocab_size) == (300, 131)
    assert runner.eos_token_ids == {130}
    runner.forget("never seen")
    runner.close()


def test_only_the_thread_that_runs_steps_is_bound_to_cores(folder: Path) -> None:
    allowed = os.sched_getaffinity(0)
    config = ModelConfig(path=str(folder), device="cpu", pin=str(max(allowed)))
    runner = TorchRunner.load(config, CacheConfig(kv_blocks=2))
    assert runner._threads == 1
    seen: list[set[int]] = []

    def engine() -> None:
        params = SamplingParams(temperature=0)
        runner.run(StepPlan((Chunk("x", 0, (1, 2, 3), (0,), True, params),)))
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert seen == [{max(allowed)}]
    assert os.sched_getaffinity(0) == allowed


def test_kv_blocks_fill_a_share_of_free_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=str(folder), device="cpu", threads=1)
    each = 16 * 3 * 2 * 2 * 16 * 4  # block x layers x (key, value) x heads x dim x bytes
    monkeypatch.setattr(memory, "free_memory", lambda: 400 * each + 1)
    runner = TorchRunner.load(config, CacheConfig())
    assert runner.n_blocks == 100
    assert bytes_per_block(runner._loaded.layers, 16) == each
    monkeypatch.setattr(memory, "free_memory", lambda: each)
    with pytest.raises(ConfigError, match=r"cache\.kv_blocks"):
        TorchRunner.load(config, CacheConfig())


def test_more_kv_memory_than_any_machine_has_is_a_wrong_setting(folder: Path) -> None:
    config = ModelConfig(path=str(folder), device="cpu", threads=1)
    with pytest.raises(ConfigError, match=r"cache\.kv_blocks: \d+: .* GiB of KV memory"):
        TorchRunner.load(config, CacheConfig(kv_blocks=10**11))


def test_free_memory_is_plausible() -> None:
    assert 1 << 20 < memory.free_memory() < 1 << 50


def test_a_model_without_tokenizer_says_so(folder: Path) -> None:
    config = ModelConfig(path=str(folder), device="cpu", threads=1)
    runner = TorchRunner.load(config, CacheConfig(kv_blocks=2))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        _ = runner.bundle


def test_an_impossible_step_is_a_runner_error_and_the_next_one_works(
    driver: Callable[..., Any],
) -> None:
    made = driver("llama")
    good = made.chunk("a", [5, 6, 7], 0, (0,))
    for bad in (
        msgspec.structs.replace(good, tokens=(5, 9999)),
        msgspec.structs.replace(good, blocks=()),
    ):
        with pytest.raises(RunnerError, match="step of"):
            made.runner.run(StepPlan((bad,)))
    result = made.runner.run(StepPlan((good,)))
    assert set(result.tokens) == {"a"}
    assert result.seconds > 0


def test_seeded_output_is_the_same_cold_warm_and_in_company(driver: Callable[..., Any]) -> None:
    made = driver("qwen2")
    prompt = list(range(2, 40))
    blocks, others = made.blocks(60), made.blocks(60, first=30, scattered=True)

    def generate(start: int, company: bool) -> list[int]:
        tokens, done = list(prompt), start
        while len(tokens) < 50:
            chunk = made.chunk("a", tokens, done, blocks)
            params = replace(chunk.params, temperature=0.9, top_p=0.95, seed=11)
            chunks = [
                msgspec.structs.replace(chunk, params=params, output_len=len(tokens) - len(prompt))
            ]
            if company:
                chunks.insert(0, made.chunk("b", tokens[::-1], 0, others))
            done = len(tokens)
            tokens.append(made.runner.run(StepPlan(tuple(chunks))).tokens["a"])
        return tokens

    cold = generate(0, company=False)
    assert generate(24, company=False) == cold
    assert generate(0, company=True) == cold


def test_it_may_be_called_from_another_thread(driver: Callable[..., Any]) -> None:
    made = driver("llama")
    plan = StepPlan((made.chunk("a", list(range(2, 30)), 0, made.blocks(28)),))
    here = made.runner.run(plan).tokens
    there: list[dict[str, int]] = []
    thread = threading.Thread(target=lambda: there.append(made.runner.run(plan).tokens))
    thread.start()
    thread.join()
    assert there == [here]


# ---- step layout ----


@pytest.mark.parametrize(
    ("blocks", "length", "expected"),
    [
        ((3, 4, 5), 10, slice(12, 22)),
        ((3,), 4, slice(12, 16)),
        ((3, 4, 9), 8, slice(12, 20)),
        ((3, 5, 4), 10, [12, 13, 14, 15, 20, 21, 22, 23, 16, 17]),
        ((5, 7, 7), 9, [20, 21, 22, 23, 28, 29, 30, 31, 28]),
        ((1, 9, 3), 12, [4, 5, 6, 7, 36, 37, 38, 39, 12, 13, 14, 15]),
    ],
)
def test_place(blocks: tuple[int, ...], length: int, expected: Any) -> None:
    pool = KvPool({}, 16, 4, torch.device("cpu"))
    place = pool.place(blocks, length)
    assert (place if isinstance(place, slice) else place.tolist()) == expected


def test_place_needs_enough_blocks() -> None:
    with pytest.raises(ValueError, match="2 blocks do not hold 9 tokens"):
        KvPool({}, 16, 4, torch.device("cpu")).place((1, 2), 9)


def test_layout_for_kernels(driver: Callable[..., Any]) -> None:
    made = driver("llama")
    pool = made.runner.pool
    chunks = (made.chunk("a", [5] * 20, 17, (4, 2, 6, 9)), made.chunk("b", [5] * 5, 0, (7, 8)))
    plan = StepPlan(chunks)
    assert chunked(plan, pool) == [
        Chunked(0, 3, 17, (4, 2, 6), None),
        Chunked(3, 5, 0, (7,), 7 * pool.block_size),
    ]
    batch = build_batch(plan, pool, Layout(torch.device("cpu")))
    assert batch.positions.tolist() == [[17, 18, 19, 0, 1, 2, 3, 4]]
    assert torch.as_tensor(batch.write_slots).tolist() == [49, 50, 51, 56, 57, 58, 59, 60]
    assert batch.sampled_rows.tolist() == [2, 7]
    with pytest.raises(ValueError, match="2 blocks do not hold 20 tokens"):
        chunked(StepPlan((msgspec.structs.replace(chunks[0], blocks=(4, 2)),)), pool)


def test_contiguous_blocks_are_read_in_place(driver: Callable[..., Any]) -> None:
    made = driver("llama")
    prompt = list(range(2, 50))
    made.decode(prompt, 3, made.blocks(60))
    assert (made.runner.counts.views, made.runner.counts.gathers) == (3, 0)
    made.decode(prompt, 3, made.blocks(60, scattered=True))
    assert (made.runner.counts.views, made.runner.counts.gathers) == (3, 3)
