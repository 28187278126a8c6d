"""Scheduler, block pool and a real (tiny) model together: the cache never shows in an answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shared.paging import BlockPool
from worker.runner import TokenLogprob
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, SamplingParams
from worker.sequence import Sequence as Generation

pytestmark = pytest.mark.torch
SIZE = 8


class OpenTier(Scheduler):
    """Uses host memory whatever a copy takes on the machine that runs the test."""

    def host_pays(self) -> bool:
        return True


class Engine:
    """Plans, runs and commits until nothing is left."""

    def __init__(self, driver: Any, *, blocks: int = 150, **limits: Any) -> None:
        self.runner = driver.runner
        caching = limits.pop("caching", True)
        settings = {"max_batch_tokens": 64, "max_running": 16, "max_waiting": 1000, **limits}
        self.scheduler = OpenTier(
            BlockPool(blocks, SIZE, caching=caching, host_blocks=self.runner.host_blocks),
            max_model_len=self.runner.max_model_len,
            eos_token_ids=self.runner.eos_token_ids,
            **settings,
        )
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self._names = itertools.count()

    def ask(self, prompt: Sequence[int], **params: Any) -> Generation:
        """Queue one greedy request."""
        chosen = SamplingParams(temperature=0, ignore_eos=True, **params)
        name = str(next(self._names))
        made = Generation(name, list(prompt), len(prompt), chosen, bytes(16), arrived=0.0)
        self.scheduler.add(made)
        return made

    def step(self) -> bool:
        """One step; false if there was nothing to do."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        result = self.runner.run(plan)
        for name, logprob in result.logprobs.items():
            self.logprobs.setdefault(name, []).append(logprob)
        self.scheduler.commit(plan, result)
        return True

    def finish(self) -> None:
        """All steps, then the pool's own proof."""
        while self.step():
            pass
        self.scheduler.check()
        assert self.scheduler.pool.n_used == 0


def answer(made: Generation) -> list[int]:
    assert made.finish is FinishReason.LENGTH
    return made.tokens[made.prompt_len :]


@pytest.fixture(scope="module")
def llama(driver: Callable[..., Any]) -> Any:
    return driver("llama", block_size=SIZE, n_blocks=160)


@pytest.mark.parametrize("budget", [1, SIZE, SIZE + 1, 64])
@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 2 * SIZE + 1, 8 * SIZE])
def test_a_prompt_that_is_entirely_cached(llama: Any, length: int, budget: int) -> None:
    prompt = [2 + 7 * i % 120 for i in range(length)]
    fresh = Engine(llama, caching=False)
    cold = fresh.ask(prompt, max_tokens=12, logprobs=5)
    fresh.finish()
    assert answer(cold) == llama.expected(prompt, 12)[0]
    engine = Engine(llama, max_batch_tokens=budget)
    for repeat in range(4):
        made = engine.ask(prompt, max_tokens=12, logprobs=5)
        engine.finish()
        assert answer(made) == answer(cold)
        assert made.cached == (0 if repeat == 0 else (length - 1) // SIZE * SIZE)
        for ours, theirs in zip(engine.logprobs[made.id], fresh.logprobs[cold.id], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize("running", [1, 8])
def test_churn_over_shared_prefixes_in_a_small_pool(llama: Any, running: int) -> None:
    """Evictions, preemptions, aborts at any moment: every answer that ends is the right one."""
    rng = random.Random(running)
    prefixes = [[rng.randrange(2, 129) for _ in range(rng.randrange(1, 90))] for _ in range(6)]
    engine = Engine(llama, blocks=34, max_running=running, max_batch_tokens=40)
    asked: list[Generation] = []
    for _ in range(60):
        tail = [rng.randrange(2, 129) for _ in range(rng.randrange(1, 30))]
        prompt = rng.choice(prefixes) + tail
        asked.append(engine.ask(prompt, max_tokens=rng.randrange(1, 24)))
        for _ in range(rng.randrange(0, 4)):
            engine.step()
        if rng.random() < 0.15:
            engine.scheduler.abort(rng.choice(asked).id)
    engine.finish()
    ended = [made for made in asked if made.finish is FinishReason.LENGTH]
    assert len(ended) > 40
    assert sum(made.cached or 0 for made in ended) > 200
    for made in ended:
        prompt = made.tokens[: made.prompt_len]
        assert answer(made) == llama.expected(prompt, made.output_len)[0]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_second_visit_after_eviction_is_served_from_host_memory(
    driver: Callable[..., Any], kind: str
) -> None:
    rng = random.Random(3)
    small = driver(kind, block_size=SIZE, n_blocks=30, host_blocks=100)
    engine = Engine(small, blocks=30)
    prompts = [[rng.randrange(2, 129) for _ in range(12 * SIZE + 3)] for _ in range(6)]
    first = [engine.ask(prompt, max_tokens=6) for prompt in prompts]
    engine.finish()
    before = engine.scheduler.counters.computed_tokens
    again = [engine.ask(prompt, max_tokens=6) for prompt in prompts]
    engine.finish()
    assert engine.scheduler.counters.computed_tokens - before == 6 * 3
    assert engine.scheduler.counters.host_tokens > 3 * 12 * SIZE
    for prompt, cold, warm in zip(prompts, first, again, strict=True):
        assert warm.cached == 12 * SIZE
        assert answer(warm) == answer(cold) == small.expected(prompt, 6)[0]


def test_churn_with_preemptions_aborts_and_flushes_over_host_memory(
    driver: Callable[..., Any],
) -> None:
    rng = random.Random(11)
    small = driver("llama", block_size=SIZE, n_blocks=34, host_blocks=40)
    prefixes = [[rng.randrange(2, 129) for _ in range(rng.randrange(40, 120))] for _ in range(6)]
    engine = Engine(small, blocks=34, max_batch_tokens=60)
    asked: list[Generation] = []
    for turn in range(60):
        tail = [rng.randrange(2, 129) for _ in range(rng.randrange(1, 30))]
        asked.append(engine.ask(rng.choice(prefixes) + tail, max_tokens=rng.randrange(1, 30)))
        for _ in range(rng.randrange(0, 6)):
            engine.step()
        if rng.random() < 0.15:
            engine.scheduler.abort(rng.choice(asked).id)
        if turn % 25 == 24:
            engine.scheduler.pool.clear()
        engine.scheduler.check()
    engine.finish()
    ended = [made for made in asked if made.finish is FinishReason.LENGTH]
    assert len(ended) > 40
    assert engine.scheduler.counters.host_tokens > 500
    assert engine.scheduler.counters.preemptions > 0
    for made in ended:
        prompt = made.tokens[: made.prompt_len]
        assert answer(made) == small.expected(prompt, made.output_len)[0]


@pytest.mark.parametrize("shared", [10 * SIZE, 9 * SIZE])
def test_siblings_of_the_same_step_never_read_what_is_not_written(llama: Any, shared: int) -> None:
    rng = random.Random(shared)
    for _ in range(4):
        prefix = [rng.randrange(2, 129) for _ in range(shared)]
        tails = [
            [] if shared == 10 * SIZE else [rng.randrange(2, 129) for _ in range(SIZE)]
            for _ in range(16)
        ]
        engine = Engine(llama, blocks=160, max_batch_tokens=512, max_running=32)
        asked = [engine.ask(prefix + tail, max_tokens=6) for tail in tails]
        engine.finish()
        expected = [llama.expected(prefix + tail, 6)[0] for tail in tails[: 16 if tails[0] else 1]]
        for index, made in enumerate(asked):
            assert answer(made) == expected[index if tails[0] else 0]
