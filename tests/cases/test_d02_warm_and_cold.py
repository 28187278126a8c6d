"""D02: warm and cold answers are equal, whatever was asked before and at the same time.

Scaled: 120 requests with the real model one by one, then 60 of them eight at a time; the answers to
compare with come from an engine without a cache. 300 are in ``test_d_served.py``.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
import torch
from casemodel import TorchReference, TorchRig, said
from enginerig import greedy, prompt

from worker.sequence import FinishReason, SamplingParams

pytestmark = pytest.mark.torch
Job = tuple[tuple[int, ...], SamplingParams]


@pytest.fixture(scope="module")
def reference() -> TorchReference:
    """Right answers, float64."""
    return TorchReference()


def jobs(seed: str, n: int, reference: TorchReference) -> list[Job]:
    """Random requests over 20 shared prefixes of 1 to 400 tokens."""
    rng = random.Random(seed)
    prefixes = [prompt(rng, rng.randint(1, 400)) for _ in range(20)]
    made: list[Job] = []
    for _ in range(n):
        tokens = rng.choice(prefixes) + prompt(rng, rng.choice((0, 0, rng.randint(1, 50))))
        params = greedy(rng.randint(1, 40))
        if rng.random() < 0.2:
            text = reference.answer(tokens, params).text
            at = rng.randrange(max(1, len(text) - 3))
            if "\ufffd" not in text[at : at + 2] and text[at : at + 2]:
                params = greedy(params.max_tokens, stop=(text[at : at + 2],))
        made.append((tokens, params))
    return made


def run(rig: TorchRig, asked: list[Job], at_once: int, rng: random.Random) -> dict[str, Job]:
    """Keep so many requests open until all are done; every tenth is aborted in between."""
    placed: dict[str, Job] = {}
    running: list[str] = []
    waiting = list(asked)
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            running.append(rig.submit(*job))
            placed[running[-1]] = job
            if rng.random() < 0.1:
                for _ in range(rng.randint(0, 12)):
                    rig.loop.step()
                rig.loop.abort(running[-1])
        rig.loop.step()
        running = [each for each in running if rig.answers[each].finish is None]
    return placed


def check(rig: TorchRig, placed: dict[str, Job], reference: TorchReference) -> None:
    """Each finished answer is the right one."""
    finished = 0
    for request_id, job in placed.items():
        answer = rig.answers[request_id]
        if answer.finish is FinishReason.ABORT:
            continue
        finished += 1
        assert said(answer) == said(reference.answer(*job))
    assert finished >= 0.8 * len(placed)
    rig.check_idle()


def test_random_requests_over_twenty_prefixes(reference) -> None:
    asked = jobs("D02", 120, reference)
    # Room for about three of them.
    rig = TorchRig(n_blocks=60, budget=96)
    one_by_one = run(rig, asked, 1, random.Random(1))
    check(rig, one_by_one, reference)
    some = run(rig, asked[::2], 8, random.Random(2))
    check(rig, some, reference)
    assert rig.loop.stats.prefill_cached_tokens > 1000


def test_repeats_do_not_get_worse(reference) -> None:
    rig = TorchRig(n_blocks=30, budget=33)
    rng = random.Random(5)
    prompts = [prompt(rng, 7 * 16 + n) for n in range(4)]
    for _ in range(12):
        for tokens in prompts:
            assert said(rig.answer(tokens, greedy(24))) == said(
                reference.answer(tokens, greedy(24))
            )
    rig.check_idle()


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.9, "seed": 11},
        {"temperature": 0.7, "seed": 3, "top_p": 0.8, "top_k": 20},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.0, "logit_bias": {101: 3.0, 111: -100.0}},
        {"temperature": 0.0, "min_tokens": 12},
    ],
    ids=["seed", "nucleus", "penalties", "bias", "min tokens"],
)
def test_other_ways_of_sampling(reference, more: dict[str, Any]) -> None:
    rng = random.Random(6)
    rig = TorchRig(n_blocks=60, budget=40)
    params = SamplingParams(max_tokens=20, **more)
    shared = prompt(rng, 90)
    asked = [
        (shared[: rng.randint(1, 90)] + prompt(rng, rng.randint(0, 20)), params) for _ in range(12)
    ]
    check(rig, run(rig, asked, 1, random.Random(0)), reference)
    check(rig, run(rig, asked, 6, random.Random(0)), reference)


async def test_over_http(torch_worker) -> None:
    """Eight clients at a time on a pool of 64 blocks, single precision."""
    single = TorchReference(torch.float32)
    asked = jobs("D02 over HTTP", 40, single)
    rng = random.Random(9)
    gate = asyncio.Semaphore(8)
    async with httpx.AsyncClient(base_url=torch_worker.url, timeout=60, trust_env=False) as http:

        async def one(job: Job, patience_s: float | None) -> None:
            tokens, params = job
            body = {
                "model": "fake",
                "prompt": list(tokens),
                "temperature": 0,
                "max_tokens": params.max_tokens,
                "stop": list(params.stop) or None,
            }
            async with gate:
                try:
                    async with asyncio.timeout(patience_s):
                        answer = await http.post("/v1/completions", json=body)
                except TimeoutError:
                    return
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == single.answer(*job).text

        patience = [rng.random() * 0.1 if rng.random() < 0.15 else None for _ in asked]
        for _ in range(2):
            await asyncio.gather(*map(one, asked, patience))
        load = (await http.get("/headwater/load")).json()
        assert load.get("running", 0) == load.get("blocks_used", 0) == 0
