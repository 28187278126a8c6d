"""KV that is not a number, with a real model: it stays with the sequence that wrote it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from casemodel import TorchReference, TorchRig, said, tiny_llama
from enginerig import greedy, prompt

from worker.model.runner import TorchRunner
from worker.model.weights import describe
from worker.sequence import FinishReason

pytestmark = pytest.mark.torch
POISON = 200
PARAMS = greedy(12, ignore_eos=True, logit_bias={POISON: -100.0})


@pytest.mark.parametrize("block_size", [5, 16])
def test_memory_that_is_not_written_is_not_read(block_size: int) -> None:
    reference = TorchReference()
    rig = TorchRig(n_blocks=60, block_size=block_size, budget=24)
    for layer in rig.runner.pool.layers.values():
        layer.keys.fill_(math.nan)
        layer.values.fill_(math.nan)
    asked = {}
    for each in range(5):
        tokens = prompt(random.Random(each), 20 + 3 * each)
        asked[rig.submit(tokens, PARAMS)] = tokens
    rig.run()
    for request_id, tokens in asked.items():
        assert said(rig.answers[request_id]) == said(reference.answer(tokens, PARAMS))


def test_a_token_that_spoils_everything_after_it_spoils_no_neighbour() -> None:
    model = tiny_llama(259, torch.float64, eos_token_id=257)
    reference = TorchReference()
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = math.nan
    rig = TorchRig(n_blocks=24, budget=40)
    rig.runner = rig.loop.runner = TorchRunner(describe(model), 24, 16, threads=1)
    rng = random.Random(1)
    asked = {}
    for turn in range(40):
        tokens = prompt(random.Random(turn % 7), rng.randint(10, 90))
        if turn % 3 == 0:
            tokens = (*tokens, POISON, *prompt(rng, rng.randint(0, 40)))
        asked[rig.submit(tokens, PARAMS)] = tokens
        for _ in range(rng.randint(1, 6)):
            rig.loop.step()
    rig.run()
    rig.check_idle()
    for request_id, tokens in asked.items():
        answer = rig.answers[request_id]
        if POISON in tokens:
            assert answer.finish is FinishReason.ERROR
            assert "not numbers" in (answer.last.error or "")
        else:
            assert said(answer) == said(reference.answer(tokens, PARAMS))
