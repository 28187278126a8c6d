"""D01: a prompt that is entirely in the cache is answered as if nothing were.

With a real model, in the engine (float64 and float32) and over HTTP (float32).
"""

from __future__ import annotations

import random

import httpx
import pytest
import torch
from casemodel import TorchReference, TorchRig, close, said
from enginerig import greedy, prompt

pytestmark = pytest.mark.torch
B = 16
LENGTHS = (1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 8 * B)
PARAMS = greedy(32, logprobs=5, ignore_eos=True)


@pytest.fixture(scope="module")
def reference() -> TorchReference:
    """Right answers, float64."""
    return TorchReference()


def four_times(rig: TorchRig, reference: TorchReference, length: int) -> None:
    """The same prompt four times."""
    tokens = prompt(random.Random(length), length)
    expected = reference.answer(tokens, PARAMS)
    for turn in range(4):
        answer = rig.answer(tokens, PARAMS)
        assert said(answer) == said(expected)
        assert close(answer, expected)
        assert answer.last.cached_tokens == (0 if turn == 0 else (length - 1) // B * B)
        assert answer.last.cached_tokens < answer.last.prompt_tokens == length
    rig.check_idle()


@pytest.mark.parametrize("budget", [1, B, B + 1])
@pytest.mark.parametrize("length", LENGTHS)
def test_four_times_the_same(reference, length, budget) -> None:
    four_times(TorchRig(budget=budget), reference, length)


@pytest.mark.parametrize("block_size", [1, 3, 24])
@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_other_block_sizes(reference, block_size, blocks, more) -> None:
    length = max(1, blocks * block_size + more)
    tokens = prompt(random.Random(length), length)
    rig = TorchRig(n_blocks=-(-400 // block_size), block_size=block_size, budget=17)
    params = greedy(8, logprobs=5, ignore_eos=True)
    for turn in range(3):
        answer = rig.answer(tokens, params)
        assert close(answer, reference.answer(tokens, params))
        assert answer.last.cached_tokens == (
            0 if turn == 0 else (length - 1) // block_size * block_size
        )
    rig.check_idle()


@pytest.mark.parametrize("budget", [B, 512])
def test_single_precision(budget) -> None:
    single = TorchReference(torch.float32)
    for length in LENGTHS:
        four_times(TorchRig(budget=budget, dtype=torch.float32), single, length)


def test_the_prompt_and_its_answer_asked_again(reference) -> None:
    """Everything up to the last token was computed while decoding; it is used, and right."""
    rig = TorchRig()
    tokens = prompt(random.Random(3), 2 * B)
    for _ in range(4):
        answer = rig.answer(tokens, PARAMS)
        assert close(answer, reference.answer(tokens, PARAMS))
        tokens = (*tokens, *answer.tokens[:B])
    assert rig.answer(tokens, PARAMS).last.cached_tokens == len(tokens) - B


def test_the_comparison_can_fail(reference) -> None:
    """One foreign block changes the answer."""
    rig = TorchRig()
    tokens = prompt(random.Random(4), 8 * B)
    rig.answer(tokens, PARAMS)
    pool = rig.runner.pool
    for layer in pool.layers.values():
        layer.keys[: 2 * B] = layer.keys[: 2 * B].roll(1, 0)
        layer.values[: 2 * B] = layer.values[: 2 * B].flip(0)
    answer = rig.answer(tokens, PARAMS)
    assert answer.last.cached_tokens == 7 * B
    assert not close(answer, reference.answer(tokens, PARAMS))


def test_over_http(torch_worker) -> None:
    single = TorchReference(torch.float32)
    with httpx.Client(base_url=torch_worker.url, timeout=30, trust_env=False) as http:
        for length in LENGTHS:
            tokens = list(prompt(random.Random(f"http {length}"), length))
            body = {
                "model": "fake",
                "prompt": tokens,
                "temperature": 0,
                "max_tokens": 32,
                "logprobs": 5,
                "ignore_eos": True,
            }
            expected = single.answer(tokens, PARAMS)
            wanted = [each.logprob for delta in expected.deltas for each in delta.logprobs or ()]
            for turn in range(4):
                made = http.post("/v1/completions", json=body).json()
                choice, usage = made["choices"][0], made["usage"]
                assert choice["text"] == expected.text
                got = choice["logprobs"]["token_logprobs"]
                assert got == pytest.approx(wanted, abs=1e-4)
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached == (0 if turn == 0 else (length - 1) // B * B)
                assert cached < usage["prompt_tokens"] == length
