"""The simulated worker: order, memory, what is cached, and what it tells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sim.model import WorkerModel
from gateway.sim.trace import TraceRequest
from gateway.sim.worker import Job, SimWorker, granule_keys
from shared.blocks import GRANULE, stride_of
from shared.events import BlocksRemoved, BlocksStored
from shared.types import WorkerId

MODEL = WorkerModel(kv_blocks=8, prefill_tokens_per_s=1000.0, overhead_s=0.01, token_s=0.1)


def job(number: int, path: tuple[int, ...], output: int = 16, answer: tuple[int, ...] = ()) -> Job:
    return Job(number, TraceRequest(0.0, 16 * len(path) + 1, output, path, answer))


def worker(model: WorkerModel = MODEL, block_size: int = 16) -> SimWorker:
    return SimWorker(WorkerId("w"), model, block_size)


def serve(sim: SimWorker, one: Job) -> int:
    """Cached tokens of a request that comes alone."""
    sim.put(one)
    assert sim.begin_prefill(0.0) is not None
    sim.end_prefill(one)
    sim.finish(one)
    return one.cached_tokens


def test_prefills_go_one_by_one_in_the_order_of_arrival() -> None:
    sim, first, second = worker(), job(1, (1,)), job(2, (2,))
    sim.put(first)
    sim.put(second)
    begun = sim.begin_prefill(0.0)
    assert begun == (first, pytest.approx(0.01 + 17 / 1000))
    assert sim.begin_prefill(0.0) is None, "one is under way"
    sim.end_prefill(first)
    begun = sim.begin_prefill(0.0)
    assert begun is not None
    job_of, took = begun
    assert job_of is second
    assert took == pytest.approx(0.01 + 17 / 1000 * 1.004), "slowed by the one that decodes"


def test_a_prompt_and_its_answer_are_cached_for_the_next_turn() -> None:
    sim = worker()
    assert serve(sim, job(1, (1, 2), output=20, answer=(3,))) == 0
    assert serve(sim, job(2, (1, 2, 3, 4))) == 48
    assert serve(sim, job(3, (1, 9))) == 16
    assert serve(sim, Job(4, TraceRequest(0.0, 32, 1, (1, 2)))) == 31, "one token is computed"
    assert sim.idle
    sim.check()


def test_without_memory_the_queue_waits_for_an_end() -> None:
    sim, big, next_one = worker(), job(1, (1, 2, 3), output=30), job(2, (1, 2, 3, 4), output=60)
    sim.put(big)
    sim.put(next_one)
    sim.begin_prefill(0.0)
    sim.end_prefill(big)
    assert sim.begin_prefill(1.0) is None, "it needs five more blocks, and three are left"
    sim.finish(big)
    assert sim.begin_prefill(2.0) is not None
    assert next_one.cached_tokens == 48
    sim.check()


def test_no_more_decode_together_than_allowed() -> None:
    sim = worker(WorkerModel(kv_blocks=8, max_running=1))
    first, second = job(1, (1,)), job(2, (2,))
    sim.put(first)
    sim.put(second)
    sim.begin_prefill(0.0)
    sim.end_prefill(first)
    assert sim.begin_prefill(0.0) is None
    sim.finish(first)
    assert sim.begin_prefill(0.0) is not None


def test_it_tells_its_load() -> None:
    sim, first, second = worker(), job(1, (1,)), job(2, (2, 3))
    sim.put(first)
    sim.begin_prefill(0.0)
    sim.put(second)
    load = sim.load(0.010)
    assert (load.running, load.waiting) == (0, 2)
    assert load.queued_prefill_tokens == 33 + 17
    assert load.blocks_used == 3
    sim.end_prefill(first)
    sim.begin_prefill(1.0)
    assert sim.load(100.0).queued_prefill_tokens == 0
    assert (sim.load(1.0).running, sim.load(1.0).waiting) == (1, 1)


def test_quadratic_attention_makes_long_prompts_dearer() -> None:
    plain, real = MODEL, WorkerModel(kv_blocks=8, overhead_s=0.0, quadratic=2e-5)
    assert plain.prefill_s(1000, 1000) == pytest.approx(1.01)
    assert real.prefill_s(1000, 100_000) > 2.9 * real.prefill_s(1000, 1000)
    assert real.decode_s(10, 64) == pytest.approx(2 * real.decode_s(10, 0))


@given(
    block_size=st.sampled_from([1, 4, 8, 16, 24, 48, 64, 512]),
    length=st.integers(0, 40),
)
def test_events_name_the_keys_that_the_gateway_looks_up(block_size: int, length: int) -> None:
    path = tuple(range(5, 5 + length))
    keys = granule_keys(path, block_size)
    assert len(keys) == length * block_size // GRANULE
    assert len(set(keys)) == len(keys)
    sim = worker(WorkerModel(kv_blocks=64), block_size)
    serve(sim, Job(1, TraceRequest(0.0, length * block_size + 1, 1, path)))
    batch = sim.drain(0.0)
    told = [] if batch is None else [key for event in batch.events for key in event.keys]  # type: ignore[union-attr]
    stride = stride_of(block_size)
    assert told == keys[stride - 1 :: stride]


def test_evictions_are_told() -> None:
    sim = worker()
    serve(sim, job(1, (1, 2, 3)))
    sim.drain(0.0)
    serve(sim, job(2, (4, 5, 6, 7, 8, 9), output=1))
    batch = sim.drain(0.0)
    assert batch is not None
    gone = [key for event in batch.events if isinstance(event, BlocksRemoved) for key in event.keys]
    came = [key for event in batch.events if isinstance(event, BlocksStored) for key in event.keys]
    assert gone == [3, 2], "leaves first"
    assert came == [4, 5, 6, 7, 8, 9]
    assert sim.drain(0.0) is None
