"""The runner as the engine sees it: plans in, tokens out, errors kept to the step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from shared.errors import ConfigError
from worker.config import CacheConfig, ModelConfig
from worker.model import attention
from worker.model import runner as runner_module
from worker.model.attention import may_use_varlen
from worker.model.batch import Layout, build_batch
from worker.model.kvcache import KvPool, bytes_per_block
from worker.model.runner import TorchRunner
from worker.runner import Runner, RunnerError, StepPlan

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


def test_kv_blocks_fill_a_share_of_free_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=str(folder), device="cpu", threads=1)
    each = 16 * 3 * 2 * 2 * 16 * 4  # block x layers x (key, value) x heads x dim x bytes
    monkeypatch.setattr(runner_module, "_free_memory", lambda: 400 * each + 1)
    runner = TorchRunner.load(config, CacheConfig())
    assert runner.n_blocks == 100
    assert bytes_per_block(runner._loaded.layers, 16) == each
    monkeypatch.setattr(runner_module, "_free_memory", lambda: each)
    with pytest.raises(ConfigError, match=r"cache\.kv_blocks"):
        TorchRunner.load(config, CacheConfig())


def test_more_kv_memory_than_any_machine_has_is_a_wrong_setting(folder: Path) -> None:
    config = ModelConfig(path=str(folder), device="cpu", threads=1)
    with pytest.raises(ConfigError, match=r"cache\.kv_blocks: \d+: .* GiB of KV memory"):
        TorchRunner.load(config, CacheConfig(kv_blocks=10**11))


def test_free_memory_is_plausible() -> None:
    assert 1 << 20 < runner_module._free_memory() < 1 << 50


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
    for bad in (replace(good, tokens=(5, 9999)), replace(good, blocks=())):
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
            chunks = [replace(chunk, params=params, output_len=len(tokens) - len(prompt))]
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


def test_block_table_for_kernels_that_read_it(driver: Callable[..., Any]) -> None:
    made = driver("llama")
    chunks = (made.chunk("a", [5] * 20, 17, (4, 2, 6, 9)), made.chunk("b", [5] * 5, 0, (7,)))
    batch = build_batch(StepPlan(chunks), made.runner.pool, Layout(torch.device("cpu"), paged=True))
    index = batch.paged
    assert index is not None
    assert index.query_starts.tolist() == [0, 3, 8]
    assert index.kv_lengths.tolist() == [20, 5]
    assert index.block_table.tolist() == [[4, 2, 6], [7, 0, 0]]
    assert (index.longest_query, index.longest_kv) == (5, 20)
    assert index.block_table.dtype == torch.int32
    assert batch.positions.tolist() == [[17, 18, 19, 0, 1, 2, 3, 4]]
    assert batch.write_slots.tolist() == [49, 50, 51, 56, 57, 58, 59, 60]
    assert batch.sampled_rows.tolist() == [2, 7]


def varlen_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """What the documentation of ``varlen_attn`` says, written out."""
    assert cu_seq_k is None
    assert query.is_contiguous()
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert window_size[1] == 0
    assert max_k == int(seqused_k.max())
    parts = []
    for line, used in enumerate(seqused_k.tolist()):
        part = query[cu_seq_q[line] : cu_seq_q[line + 1]].transpose(0, 1)
        assert part.shape[1] <= max_q
        group = query.shape[1] // key.shape[2]
        keys, values = (
            pool[block_table[line].long()].flatten(0, 1)[:used].transpose(0, 1)
            for pool in (key, value)
        )
        at = torch.arange(used - part.shape[1], used)[:, None]
        other = torch.arange(used)
        mask = other <= at
        if window_size[0] >= 0:
            mask &= other >= at - window_size[0]
        scores = part @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        parts.append((weights @ values.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "llama_mha_bias"])
def test_the_block_table_kernel_gets_what_it_documents(
    driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    made = driver(kind)
    monkeypatch.setattr(attention, "varlen_attn", varlen_by_hand)
    made.runner._layout = replace(made.runner._layout, paged=True)
    made.runner.check()
    prompts = [list(range(2, 60)), list(range(9, 40)), [7, 8]]
    tables = [made.blocks(70, first=20 * i, scattered=i == 1) for i in range(3)]
    together = made.decode_together(prompts, 6, tables, size=13)
    assert together == [made.expected(prompt, 6)[0] for prompt in prompts]


def test_a_block_table_kernel_that_fails_is_replaced(
    driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("page size must be a multiple of 256")

    made = driver("llama")
    monkeypatch.setattr(attention, "varlen_attn", broken)
    made.runner._layout = replace(made.runner._layout, paged=True)
    with structlog.testing.capture_logs() as logs:
        made.runner.check()
    assert [line["event"] for line in logs] == ["paged_kernel_unusable"]
    assert "multiple of 256" in logs[0]["reason"]
    prompt = list(range(2, 60))
    assert made.decode(prompt, 4, made.blocks(70))[0] == made.expected(prompt, 4)[0]


def test_the_block_table_kernel_is_for_half_precision_on_cuda(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> None:
    from worker.model.weights import describe

    half = describe(model_of(config_of_kind("llama"), torch.bfloat16))
    pool = KvPool(half.layers, 2, 4, torch.device("cpu"))
    assert may_use_varlen(torch.device("cuda:0"), list(pool.layers.values()))
    assert not may_use_varlen(torch.device("cpu"), list(pool.layers.values()))
    full = describe(model_of(config_of_kind("llama")))
    pool = KvPool(full.layers, 2, 4, torch.device("cpu"))
    assert not may_use_varlen(torch.device("cuda:0"), list(pool.layers.values()))


def test_contiguous_blocks_are_read_in_place(driver: Callable[..., Any]) -> None:
    made = driver("llama")
    prompt = list(range(2, 50))
    made.decode(prompt, 3, made.blocks(60))
    assert (made.runner.counts.views, made.runner.counts.gathers) == (3, 0)
    made.decode(prompt, 3, made.blocks(60, scattered=True))
    assert (made.runner.counts.views, made.runner.counts.gathers) == (3, 3)
