"""The engine with its thread, as the server uses it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
from enginerig import ROOT, Reference, decode, greedy, prompt, replay

from shared.errors import BadRequest, ContextLengthExceeded, InternalError, NoCapacity
from shared.events import CacheEvent
from shared.paging import BlockPool
from worker.detokenise import Detokenizer
from worker.engine import Delta, Engine, GenerationRequest, StepRecord
from worker.fake_runner import FakeModel, FakeRunner
from worker.runner import StepPlan, StepResult
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, SamplingParams

N_BLOCKS = 60


class GatedRunner(FakeRunner):
    """Computes steps only while its gate is open."""

    gate: threading.Event
    entered: threading.Event
    permits: threading.Semaphore | None = None
    broken: bool = False

    def run(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.gate.wait(20)
        assert self.permits is None or self.permits.acquire(timeout=20)
        if self.broken:
            raise ZeroDivisionError("a bug")
        return super().run(plan)


class Fixture:
    def __init__(
        self,
        on_events: Callable[[list[CacheEvent]], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = lambda _: None,
        prefill_s_per_token: float = 0.0,
    ) -> None:
        model = FakeModel(N_BLOCKS, 16, prefill_s_per_token=prefill_s_per_token)
        self.runner = GatedRunner(model, sleep=sleep, clock=clock, rng=random.Random(1))
        self.runner.gate, self.runner.entered = threading.Event(), threading.Event()
        self.runner.gate.set()
        self.events: list[CacheEvent] = []
        self.batches = 0
        self.records: list[StepRecord] = []
        self.scheduler = Scheduler(
            BlockPool(N_BLOCKS, 16),
            max_batch_tokens=64,
            max_running=16,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            max_waiting=50,
        )
        self.engine = Engine(
            self.runner,
            self.scheduler,
            lambda tokens: Detokenizer(decode, tokens),
            clock,
            on_events or self.collect,
            self.records.append,
        )

    def collect(self, events: list[CacheEvent]) -> None:
        self.events += events
        self.batches += 1

    async def answer(self, request: GenerationRequest) -> list[Delta]:
        return [delta async for delta in self.engine.generate(request)]

    async def idle(self) -> None:
        """Until the engine has nothing left; bounded by the test's timeout."""
        while not await self.engine.call(lambda: self.scheduler.idle):
            pass
        await self.engine.call(self.scheduler.check)
        assert self.scheduler.pool.available == N_BLOCKS


@pytest.fixture
async def rig() -> AsyncIterator[Fixture]:
    made = Fixture()
    made.engine.start()
    yield made
    made.runner.gate.set()
    await made.engine.stop()


def request(name: str, length: int = 50, params: SamplingParams | None = None) -> GenerationRequest:
    tokens = prompt(random.Random(length), length)
    return GenerationRequest(name, tokens, params or greedy(20), ROOT)


async def test_concurrent_answers_equal_the_reference(rig: Fixture) -> None:
    reference = Reference()
    requests = [request(str(each), 10 + each) for each in range(40)]
    answers = await asyncio.gather(*(rig.answer(each) for each in requests))
    for asked, deltas in zip(requests, answers, strict=True):
        text, tokens, *_ = reference.outcome(asked.prompt_tokens, asked.params)
        assert "".join(delta.text for delta in deltas) == text
        assert [token for delta in deltas for token in delta.token_ids] == tokens
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [
            True
        ]
    await rig.idle()
    assert sum(record.tokens for record in rig.records) > 0
    assert sum(rig.engine.stats().steps.values()) == len(rig.records)


async def test_a_report_leaves_out_what_the_running_step_has_done() -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    rig = Fixture(clock=lambda: now[0], sleep=sleep, prefill_s_per_token=0.01)
    rig.engine.start()
    task = None
    try:
        await rig.answer(request("shows its pace", 60))
        rig.runner.gate.clear()
        rig.runner.entered.clear()
        task = asyncio.create_task(rig.answer(request("long", 200)))
        await asyncio.to_thread(rig.runner.entered.wait, 20)
        told = []
        # Its first step has 64 tokens; that it takes far longer says nothing about the rest.
        for later_s in (0.0, 0.25, 0.25, 100.0):
            now[0] += later_s
            told.append(rig.engine.load().queued_prefill_tokens)
        assert told == [200, 175, 150, 136]
    finally:
        rig.runner.gate.set()
        if task is not None:
            await task
        await rig.engine.stop()
    assert rig.engine.load().queued_prefill_tokens == 0


async def test_closing_an_answer_frees_its_blocks(rig: Fixture) -> None:
    rig.runner.permits = threading.Semaphore(4)
    stream = rig.engine.generate(request("a", params=greedy(900, ignore_eos=True)))
    async with contextlib.aclosing(stream):
        async for delta in stream:
            if delta.output_tokens == 3:
                break
    rig.runner.permits.release(900)
    await rig.idle()
    # A fifth step may have been running when the client left; no other may follow.
    assert 3 <= rig.scheduler.counters.decode_tokens <= 5
    assert rig.engine.load().running == 0


async def test_cancelling_a_waiting_client_aborts(rig: Fixture) -> None:
    rig.runner.gate.clear()
    tasks = [asyncio.create_task(rig.answer(request(str(each)))) for each in range(20)]
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    rig.runner.gate.set()
    await rig.idle()


async def test_abort_by_id_ends_the_stream(rig: Fixture) -> None:
    rig.runner.gate.clear()
    task = asyncio.create_task(rig.answer(request("a")))
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    rig.engine.abort("a")
    rig.engine.abort("a")
    rig.engine.abort("never heard of")
    rig.runner.gate.set()
    deltas = await task
    assert deltas[-1].finish is FinishReason.ABORT
    await rig.idle()


async def test_refusals_come_before_the_first_delta(rig: Fixture) -> None:
    bad = {
        BadRequest: GenerationRequest("a", (), greedy(1), ROOT),
        ContextLengthExceeded: request("b", N_BLOCKS * 16),
    }
    for error, asked in bad.items():
        with pytest.raises(error):
            await rig.answer(asked)
    for token in (-1, 259):
        with pytest.raises(BadRequest, match="vocabulary"):
            await rig.answer(GenerationRequest("c", (1, token), greedy(1), ROOT))


async def test_a_full_queue_is_refused(rig: Fixture) -> None:
    rig.runner.gate.clear()
    first = asyncio.create_task(rig.answer(request("first")))
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    tasks = [asyncio.create_task(rig.answer(request(str(each), 20 + each))) for each in range(60)]
    await asyncio.sleep(0)
    assert (rig.engine.load().running, rig.engine.load().waiting) == (1, 60)
    rig.runner.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, NoCapacity) for result in results) == 10
    await first
    await rig.idle()


async def test_load_during_a_step_counts_what_was_accepted_before_it() -> None:
    # No pace is known where no time passes, so nothing of the running step counts as done.
    rig = Fixture(clock=lambda: 100.0)
    rig.engine.start()
    gate = rig.runner.gate
    gate.clear()
    tasks = [asyncio.create_task(rig.answer(request("0", 200)))]
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    tasks += [asyncio.create_task(rig.answer(request(str(each), 200 + each))) for each in (1, 2)]
    await asyncio.sleep(0)
    rig.runner.gate = threading.Event()
    rig.runner.entered.clear()
    gate.set()
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    load = rig.engine.load()
    # The second step completes the first prompt's second chunk and takes nobody else in.
    assert (load.running, load.waiting) == (1, 2)
    assert load.queued_prefill_tokens == 603 - 64
    rig.runner.gate.set()
    await asyncio.gather(*tasks)
    await rig.engine.stop()


async def test_a_snapshot_agrees_with_the_batches_before_it(rig: Fixture) -> None:
    await asyncio.gather(*(rig.answer(request(str(each), 30 * each + 5)) for each in range(12)))
    batches, keys, _ = await rig.engine.snapshot()
    assert batches == rig.batches
    assert replay(rig.events) == set(keys)
    assert keys
    await rig.engine.flush_cache()
    batches, keys, _ = await rig.engine.snapshot()
    assert (batches, keys) == (rig.batches, [])
    assert replay(rig.events) == set()


async def test_health_tells_a_stuck_step(rig: Fixture) -> None:
    now = time.monotonic()
    assert rig.engine.healthy(now)
    rig.runner.gate.clear()
    task = asyncio.create_task(rig.answer(request("a")))
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    assert rig.engine.healthy(time.monotonic())
    assert not rig.engine.healthy(time.monotonic() + 20)
    rig.runner.gate.set()
    await task
    await rig.idle()
    assert rig.engine.healthy(time.monotonic() + 20)


async def test_stop_lets_running_answers_finish_and_refuses_new_ones(rig: Fixture) -> None:
    rig.runner.gate.clear()
    task = asyncio.create_task(rig.answer(request("a")))
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    stopping = asyncio.create_task(rig.engine.stop(20.0))
    await asyncio.sleep(0)
    with pytest.raises(NoCapacity):
        await rig.answer(request("b"))
    assert rig.engine.load().draining
    rig.runner.gate.set()
    deltas = await task
    assert deltas[-1].finish in (FinishReason.STOP, FinishReason.LENGTH)
    await stopping
    assert not rig.engine.healthy(time.monotonic())


async def test_stop_without_patience_aborts(rig: Fixture) -> None:
    rig.runner.gate.clear()
    task = asyncio.create_task(rig.answer(request("a", params=greedy(900, ignore_eos=True))))
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    stopping = asyncio.create_task(rig.engine.stop())
    for _ in range(20):  # the order to halt is in the inbox before the first step ends
        await asyncio.sleep(0)
    rig.runner.gate.set()
    await stopping
    assert (await task)[-1].finish is FinishReason.ABORT


async def test_a_crash_leaves_nobody_waiting(rig: Fixture) -> None:
    rig.runner.gate.clear()
    tasks = [asyncio.create_task(rig.answer(request(str(each)))) for each in range(3)]
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    question = asyncio.create_task(rig.engine.call(lambda: 1))
    await asyncio.sleep(0)
    rig.runner.broken = True
    rig.runner.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(
        isinstance(each, NoCapacity) or each[-1].finish is FinishReason.ERROR for each in answers
    )
    with pytest.raises(InternalError):
        await question
    with pytest.raises(InternalError):
        await rig.answer(request("late"))
    assert not rig.engine.healthy(time.monotonic())


async def test_errors_in_a_call_go_to_the_caller(rig: Fixture) -> None:
    with pytest.raises(ZeroDivisionError):
        await rig.engine.call(lambda: 1 // 0)
    assert await rig.engine.call(lambda: 2) == 2


async def test_whoever_asks_and_leaves_does_no_harm(rig: Fixture) -> None:
    """A flush whose client closes the connection while a step runs."""
    rig.runner.gate.clear()
    task = asyncio.create_task(rig.answer(request("a")))
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    questions = [asyncio.create_task(rig.engine.flush_cache()) for _ in range(3)]
    await asyncio.sleep(0)
    for question in questions:
        question.cancel()
    await asyncio.gather(*questions, return_exceptions=True)
    rig.runner.gate.set()
    assert (await task)[-1].finish is not FinishReason.ERROR
    await rig.idle()
    assert rig.engine.alive


async def test_a_machine_whose_steps_are_long_is_not_stalled(rig: Fixture) -> None:
    """Steps of a minute have been seen: two minutes are no stall, four are."""
    rig.engine._steps.longest_s = 60.0
    rig.runner.gate.clear()
    task = asyncio.create_task(rig.answer(request("a")))
    await asyncio.to_thread(rig.runner.entered.wait, 20)
    assert rig.engine.healthy(time.monotonic() + 120)
    assert not rig.engine.healthy(time.monotonic() + 240)
    rig.runner.gate.set()
    await task
    assert 0.0 < rig.engine._steps.longest_s < 60.0
