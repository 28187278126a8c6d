"""Greedy tokens and logits equal transformers' own under any chunking, cache, batch and blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from worker.runner import StepPlan

pytestmark = pytest.mark.torch
PROMPT, NEW = 61, 10


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids without repetition structure."""
    rng = random.Random(seed)
    return [rng.randrange(2, 129) for _ in range(length)]


Output = tuple[list[int], Tensor]


def assert_equal(ours: Output, theirs: Output, kind: str) -> None:
    """Same tokens; logits within what the reference's own precision allows."""
    assert ours[0] == theirs[0]
    # the reference of gemma2 computes its softmax in float32
    limit = 1e-4 if kind == "gemma2" else 1e-9
    assert float((ours[1] - theirs[1]).abs().max() / theirs[1].abs().max()) < limit


@pytest.fixture(scope="session")
def case(any_driver: Any) -> tuple[Any, list[int], tuple[list[int], Tensor], str]:
    """Driver, prompt, reference and model type."""
    prompt = prompt_of(PROMPT)
    kind = any_driver.loaded.model.config.model_type
    return any_driver, prompt, any_driver.expected(prompt, NEW), kind


def test_references_are_not_degenerate(case: Any) -> None:
    _, _, (tokens, logits), _ = case
    assert len(set(tokens)) >= NEW // 2
    top = logits.topk(2).values
    assert float((top[:, 0] - top[:, 1]).min()) > 1e-5
    assert 0.01 < float(logits.softmax(-1).max()) < 0.9999


def test_cold(case: Any) -> None:
    driver, prompt, expected, kind = case
    assert_equal(driver.decode(prompt, NEW, driver.blocks(PROMPT + NEW)), expected, kind)


@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_chunked(case: Any, size: int) -> None:
    driver, prompt, expected, kind = case
    blocks = driver.blocks(PROMPT + NEW, first=3)
    assert_equal(driver.decode(prompt, NEW, blocks, size=size), expected, kind)


def test_scattered_blocks(case: Any) -> None:
    driver, prompt, expected, kind = case
    blocks = driver.blocks(PROMPT + NEW, scattered=True)
    gathers = driver.runner.counts.gathers
    assert_equal(driver.decode(prompt, NEW, blocks, size=23), expected, kind)
    assert driver.runner.counts.gathers > gathers


@pytest.mark.parametrize("scattered", [False, True])
def test_warm_with_any_split(case: Any, scattered: bool) -> None:
    driver, prompt, expected, kind = case
    blocks = driver.blocks(PROMPT + NEW, first=20, scattered=scattered)
    # another sequence with the same beginning left its KV there, and others its own after it
    driver.prefill(prompt + prompt_of(NEW, seed=5), blocks)
    for kept in (1, 8, 19, 20, 21, 40, 56, 60):
        driver.prefill(prompt[:kept] + prompt_of(PROMPT - kept, seed=kept), blocks)
        ours = driver.decode(prompt, NEW, blocks, start=kept, size=30)
        assert_equal(ours, expected, kind)


def test_batched_with_others(case: Any) -> None:
    driver, prompt, expected, _ = case
    others = [prompt_of(n, seed=n) for n in (5, 33, 90)]
    prompts = [others[0], prompt, others[1], others[2]]
    tables: list[Sequence[int]] = [
        driver.blocks(len(p) + NEW, first=20 * i, scattered=i == 2) for i, p in enumerate(prompts)
    ]
    together = driver.decode_together(prompts, NEW, tables, size=16)
    assert together[1] == expected[0]
    for tokens, other in zip(
        (together[0], together[2], together[3]), (prompts[0], prompts[2], prompts[3]), strict=True
    ):
        assert tokens == driver.expected(other, NEW)[0]


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_block_sizes(driver: Callable[..., Any], kind: str, block_size: int) -> None:
    made = driver(kind, block_size=block_size, n_blocks=-(-2 * (PROMPT + NEW) // block_size) + 2)
    prompt = prompt_of(PROMPT)
    ours = made.decode(prompt, NEW, made.blocks(PROMPT + NEW, scattered=True), size=9)
    assert_equal(ours, made.expected(prompt, NEW), kind)


@pytest.mark.parametrize("window", [2, 3, 7, 60, 61, 62, 70, 71, 72, 500])
def test_windows_around_the_edges(driver: Callable[..., Any], window: int) -> None:
    # not 1: transformers' own cache keeps one token too many then
    made = driver("mistral", sliding_window=window)
    prompt = prompt_of(PROMPT)
    ours = made.decode(prompt, NEW, made.blocks(PROMPT + NEW), size=13)
    assert_equal(ours, made.expected(prompt, NEW), "mistral")


def test_a_spoilt_block_shows(driver: Callable[..., Any]) -> None:
    """The comparison can fail: one foreign KV block changes nearly every output."""
    made = driver("llama")
    changed = 0
    for round_ in range(40):
        prompt = prompt_of(PROMPT, seed=100 + round_)
        blocks = made.blocks(PROMPT + NEW)
        clean, _ = made.decode(prompt, NEW, blocks)
        made.prefill(prompt, blocks)
        spoilt = made.runner.block_size * (round_ % 7)
        for layer in made.runner.pool.layers.values():
            part = slice(spoilt, spoilt + made.runner.block_size)
            layer.keys[:, part] = layer.keys[:, part].roll(1, 1)
            layer.values[:, part] = layer.values[:, part].flip(1)
        changed += made.decode(prompt, NEW, blocks, start=PROMPT - 1)[0] != clean
    assert changed >= 38


def test_a_step_without_samples_computes_and_returns_nothing(driver: Callable[..., Any]) -> None:
    made = driver("llama")
    prompt = prompt_of(PROMPT)
    blocks = made.blocks(PROMPT + NEW)
    chunk = msgspec.structs.replace(made.chunk("x", prompt[:40], 0, blocks), sample=False)
    result = made.runner.run(StepPlan((chunk,)))
    assert result.tokens == {}
    assert result.logprobs == {}
    assert made.decode(prompt, NEW, blocks, start=40)[0] == made.expected(prompt, NEW)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types_stay_close(
    driver: Callable[..., Any], model_of: Callable[..., Any], dtype: torch.dtype
) -> None:
    made = driver("llama")
    prompt = prompt_of(PROMPT)
    exact = made.expected(prompt, 1)[1][0]
    made.loaded.model.to(dtype)
    low = type(made)(
        made.loaded,
        type(made.runner)(_retyped(made.loaded), 40, 8, threads=1),
        "sdpa",
    )
    logits = low.prefill(prompt, low.blocks(PROMPT, scattered=True), size=25).double()
    distance = float((logits - exact).norm() / exact.norm())
    assert 0 < distance < {torch.float32: 1e-4}.get(dtype, 0.1)


def _retyped(loaded: Any) -> Any:
    from worker.model.weights import describe

    return describe(loaded.model)
