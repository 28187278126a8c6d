"""D04: a block that is reused is listed nowhere else.

Scaled: 210 requests with the real model here; the thousands are in ``test_d_served.py``, with
modelled KV contents.
"""

from __future__ import annotations

import random

import pytest
from casemodel import TorchReference, TorchRig, said
from enginerig import greedy, prompt

from worker.sequence import SamplingParams

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("block_size", "n_blocks"), [(16, 40), (3, 214)])
def test_two_hundred_families_on_forty_blocks(block_size, n_blocks) -> None:
    rng = random.Random(block_size)
    reference = TorchReference()
    families = [prompt(rng, rng.randint(3 * 16, 20 * 16)) for _ in range(120)]
    # Half of them branch off from another one.
    for at in range(0, 120, 2):
        stem = rng.choice(families)
        families[at] = (stem[: rng.randint(1, len(stem))] + families[at])[: len(families[at])]
    settings: list[SamplingParams] = [greedy(1), greedy(12), greedy(20, ignore_eos=True)]
    rig = TorchRig(n_blocks=n_blocks, block_size=block_size, budget=96)
    asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    running: list[str] = []
    n_requests = 150 if block_size == 16 else 60
    while len(asked) < n_requests or running:
        while len(running) < 24 and len(asked) < n_requests:
            job = rng.choice(families), rng.choice(settings)
            running.append(rig.submit(*job))
            asked[running[-1]] = job
        assert rig.loop.step()
        if rng.random() < 0.05:
            rig.scheduler.check()
            load = rig.scheduler.load()
            assert load.blocks_used + load.blocks_cached + rig.pool.n_free == n_blocks
        running = [each for each in running if rig.answers[each].finish is None]
    for request_id, job in asked.items():
        answer = rig.answers[request_id]
        assert said(answer) == said(reference.answer(*job))
        assert answer.last.cached_tokens < len(job[0])
    assert rig.loop.stats.prefill_cached_tokens > 0
    rig.check_idle()


def test_a_look_up_is_not_believed_after_an_eviction() -> None:
    """Queued while its prefix is cached, run after others have taken the blocks."""
    rng = random.Random(1)
    reference = TorchReference()
    rig = TorchRig(n_blocks=24, budget=64)
    shared = prompt(rng, 8 * 16)
    for _ in range(6):
        rig.answer(shared, greedy(1))
        big = [(prompt(rng, 18 * 16), greedy(4)) for _ in range(2)]
        jobs = [*big, (shared + prompt(rng, 20), greedy(8)), (shared, greedy(8))]
        ids = [rig.submit(*job) for job in jobs]
        while rig.loop.step():
            rig.scheduler.check()
        for request_id, job in zip(ids, jobs, strict=True):
            assert said(rig.answers[request_id]) == said(reference.answer(*job))
    rig.check_idle()
