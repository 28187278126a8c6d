"""Log-probabilities of prompt tokens against a plain forward of the same model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from worker.model import scores
from worker.model.scores import token_logprobs
from worker.runner import Chunk, RunnerError, StepPlan
from worker.sequence import SamplingParams, TokenLogprob

pytestmark = pytest.mark.torch


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(2, 129) for _ in range(length)]


def plain(made: Any, prompt: list[int]) -> Tensor:
    """Log-probabilities ``[P, V]`` by the model's own attention."""
    model = made.loaded.model
    ours = model.config._attn_implementation
    model.set_attn_implementation(made.reference)
    try:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    finally:
        model.set_attn_implementation(ours)
    return logits.log_softmax(-1)


def check(entries: tuple[TokenLogprob, ...], expected: Tensor, prompt: list[int], n: int) -> None:
    """One entry per token but the first."""
    assert len(entries) == len(prompt) - 1
    for row, (token, entry) in enumerate(zip(prompt[1:], entries, strict=True)):
        assert entry.logprob == pytest.approx(float(expected[row, token]), abs=1e-4)
        assert entry.rank == 1 + int((expected[row] > expected[row, token]).sum())
        best = expected[row].topk(n)
        assert [other for other, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def scored(made: Any, name: str, prompt: list[int], start: int, end: int, first: int) -> Chunk:
    """A chunk that wants the targets of its part of the prompt."""
    blocks = made.blocks(len(prompt), first=first)
    chunk = made.chunk(name, prompt[:end], start, blocks)
    params = SamplingParams(temperature=0, prompt_logprobs=4)
    return msgspec.structs.replace(
        chunk,
        sample=end == len(prompt),
        params=params,
        targets=tuple(prompt[start + 1 : end + 1]),
    )


@pytest.mark.parametrize("at_once", [1, 5, 128])
def test_every_architecture(any_driver: Any, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Two prompts in shared steps, beside one that wants nothing; the token is still right."""
    monkeypatch.setattr(scores, "ROWS_AT_ONCE", at_once)
    made = any_driver
    long, short, other = prompt_of(41), prompt_of(23, 1), prompt_of(30, 2)
    got: dict[str, tuple[TokenLogprob, ...]] = {"long": (), "short": ()}
    tokens: dict[str, int] = {}
    for start, end in ((0, 9), (9, 30), (30, 41)):
        chunks = [scored(made, "long", long, start, end, 0)]
        if start < 30:
            chunks.append(made.chunk("other", other[:end], start, made.blocks(30, first=60)))
        if start == 9:
            chunks.append(scored(made, "short", short, 0, 23, 30))
        result = made.runner.run(StepPlan(tuple(chunks)))
        assert set(result.prompt_logprobs) == {c.seq_id for c in chunks if c.targets}
        for name, entries in result.prompt_logprobs.items():
            got[name] += entries
        tokens |= result.tokens
    for name, prompt in (("long", long), ("short", short), ("other", other)):
        expected = plain(made, prompt)
        if name in got:
            check(got[name], expected, prompt, 4)
        assert tokens[name] == int(expected[-1].argmax())


def test_few_rows_of_logits_at_a_time_and_the_layers_once(
    driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "ROWS_AT_ONCE", 16)
    made = driver("llama")
    model = made.loaded.model
    rows: list[int] = []
    layers: list[int] = []
    prompt = prompt_of(100)
    hooks = (
        model.lm_head.register_forward_hook(lambda *call: rows.append(call[-1].shape[-2])),
        model.model.layers[0].register_forward_hook(lambda *_: layers.append(1)),
    )
    result = made.runner.run(StepPlan((scored(made, "a", prompt, 0, 100, 0),)))
    for hook in hooks:
        hook.remove()
    assert rows == [1, *[16] * 6, 3]
    assert layers == [1]
    check(result.prompt_logprobs["a"], plain(made, prompt), prompt, 4)
    # afterwards the layers compute again
    assert made.decode(prompt, 4, made.blocks(104))[0] == made.expected(prompt, 4)[0]


def test_a_failed_step_leaves_the_model_as_it_was(
    driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = driver("llama")
    prompt = prompt_of(40)
    bad = scored(made, "a", prompt, 0, 40, 0)
    with pytest.raises(RunnerError):
        made.runner.run(StepPlan((msgspec.structs.replace(bad, targets=(9999,)),)))
    assert made.decode(prompt, 4, made.blocks(44))[0] == made.expected(prompt, 4)[0]


def test_ranks_ties_and_more_alternatives_than_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 1.0, 2.0, 2.0]])
    one, two = token_logprobs(logits, [2, 1], [1, 20])
    expected = logits.double().log_softmax(-1)
    assert one.rank == 1
    assert one.logprob == pytest.approx(float(expected[0, 2]))
    assert len(one.top) == 1
    assert two.rank == 4
    assert sorted(two.top) == [
        (token, pytest.approx(float(expected[1, token]), abs=1e-5)) for token in range(4)
    ]
    half = token_logprobs(logits.bfloat16(), [2, 1], [0, 0])
    assert [entry.top for entry in half] == [(), ()]
    assert half[0].logprob == pytest.approx(one.logprob, abs=1e-5)


def test_logits_that_are_not_numbers_fail_their_sequence_alone() -> None:
    params = SamplingParams(prompt_logprobs=1)
    chunks = [
        Chunk(name, 0, (1, 2, 3), (0,), False, params, targets=(2, 3)) for name in ("a", "b", "c")
    ]

    def logits_of(rows: Any) -> Tensor:
        logits = torch.zeros(len(rows), 5)
        logits[[place for place, row in enumerate(rows) if row == 4]] = float("nan")
        return logits

    found = scores.score_prompts(chunks, logits_of)
    assert set(found.logprobs) == {"a", "c"}
    assert found.failed == {"b": scores.NOT_NUMBERS}
    assert [len(entries) for entries in found.logprobs.values()] == [2, 2]
