"""``headwater worker --benchmark`` on a tiny model: the report's shape, never its speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from shared.bytetok import byte_bundle
from worker.benchmark import Report
from worker.cli import app
from worker.config import CacheConfig, ModelConfig
from worker.model.measure import TimedRunner
from worker.runner import Chunk, StepPlan
from worker.sequence import SamplingParams

pytestmark = pytest.mark.torch

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def folder(
    tmp_path: Path, config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> Path:
    """A saved tiny llama with a tokenizer."""
    config = config_of_kind("llama", vocab_size=300, max_position_embeddings=4096)
    model_of(config, torch.float32).save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "tokenizer.json").write_text(byte_bundle().tokenizer_json)
    return tmp_path / "tiny"


def command(folder: Path, *more: str) -> list[str]:
    return ["--benchmark", "--model", str(folder), "--device", "cpu", "--threads", "1", *more]


def test_the_report_names_what_was_measured_and_what_did_not_fit(folder: Path) -> None:
    done = CliRunner().invoke(app, command(folder, "--kv-blocks", "400", "--format", "json"))
    assert done.exit_code == 0, done.output
    report = msgspec.json.decode(done.stdout, type=Report)
    assert report.about["model"] == "tiny"
    assert (report.about["device"], report.about["dtype"]) == ("cpu", "float32")
    assert (report.about["threads"], report.about["kv_blocks"]) == (1, 400)
    assert [p.tokens for p in report.prefill] == [128, 512, 2048]
    assert [(d.batch, d.context) for d in report.decode] == [(1, 512), (4, 512)]
    assert [line.partition(":")[0] for line in report.skipped] == [
        "decode at batch 16",
        "decode at batch 64",
    ]
    assert report.reuse is not None
    assert (report.reuse.tokens, report.reuse.cached) == (2048, 2000)
    assert report.reuse.ideal_ratio is not None
    assert 1 < report.reuse.ideal_ratio < 2048 / 48
    shares = [row.outside_forward for row in (*report.prefill, *report.decode)]
    assert all(0 < share < 1 for share in shares)
    assert min(report.bounds.read_bytes_per_s, report.bounds.gemm_flop_per_s) > 0


def test_text_for_people_and_progress_apart_from_it(folder: Path) -> None:
    args = command(folder, "--kv-blocks", "40", "--no-prefix-cache")
    done = CliRunner(env={"COLUMNS": "100"}).invoke(app, args)
    assert done.exit_code == 0, done.output
    for part in ("prefill of 512", "decode 1 x 512", "memory read", "GFLOP/s", "kv_blocks 40"):
        assert part in done.stdout
    assert "prefill of 2048: needs" in " ".join(done.stdout.split())
    assert "the prefix cache is off" in done.stdout
    assert "decode at batch 1" in done.stderr


def test_time_in_forward_is_within_time_in_run(folder: Path) -> None:
    model = ModelConfig(path=str(folder), device="cpu", threads=1)
    runner = TimedRunner.load(model, CacheConfig(kv_blocks=8))
    before = runner.forward()
    chunk = Chunk("x", 0, tuple(range(20)), (0, 1), True, GREEDY)
    seconds = runner.run(StepPlan((chunk,))).seconds
    assert 0 < (runner.forward() - before).wall < seconds


def test_noise_fills_the_blocks_it_is_asked_for_and_no_other(folder: Path) -> None:
    model = ModelConfig(path=str(folder), device="cpu", threads=1)
    runner = TimedRunner.load(model, CacheConfig(kv_blocks=8))
    for layer in runner.pool.layers.values():
        layer.keys.zero_()
        layer.values.zero_()
    runner.write_noise(5)
    for layer in runner.pool.layers.values():
        for kept in (layer.keys, layer.values):
            assert kept[:, : 5 * 16].ne(0).all()
            assert kept[:, 5 * 16 :].eq(0).all()


def test_arithmetic_of_a_tiny_llama(folder: Path) -> None:
    runner = TimedRunner.load(
        ModelConfig(path=str(folder), device="cpu", threads=1), CacheConfig(kv_blocks=2)
    )
    shape = runner.shape
    assert shape is not None
    attention = 48 * 64 + 2 * 48 * 32 + 64 * 48  # q, k and v, o
    assert shape.body_weights == 3 * (attention + 3 * 48 * 80)
    assert shape.head_weights == 300 * 48
    assert shape.attention_width == 3 * 4 * 16
    assert shape.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4


def test_a_mixture_of_experts_has_no_such_arithmetic(
    config_of_kind: Callable[..., Any], model_of: Callable[..., Any]
) -> None:
    from worker.model.measure import shape_of
    from worker.model.weights import describe

    assert shape_of(describe(model_of(config_of_kind("qwen3_moe")))) is None
