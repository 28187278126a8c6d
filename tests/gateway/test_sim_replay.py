"""Whole simulations: equal to the judge's, repeatable, and within the bounds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simkit import chats, cut, encoded, row

from gateway.routing.catalogue import FACTORIES
from gateway.sim.bounds import infinite_hits, pooled_hits, queue_ttft, time_scale
from gateway.sim.files import load_trace
from gateway.sim.model import WorkerModel
from gateway.sim.replay import Replay
from gateway.sim.result import percentile
from gateway.sim.simulate import bounds_of, simulate
from gateway.sim.text import to_json
from gateway.sim.trace import Trace, read_trace

BENCH = Path(__file__).resolve().parents[2] / "bench"
CHATS = read_trace(encoded(chats()), 16)


@pytest.fixture(scope="module")
def agreement() -> ModuleType:
    """``bench/simulator.py``, which knows the judge and the policies that draw as it does."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("bench_simulator", BENCH / "simulator.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.mark.torch  # the judge needs numpy, which comes with the worker
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
@pytest.mark.parametrize(
    ("name", "block_size", "lines", "workers", "blocks", "rate"),
    [
        ("tau_airline_a.b16.jsonl.gz", 16, 250, 3, 1000, 2000.0),
        ("sharegpt_a.b64.jsonl.gz", 64, 400, 4, 300, 2000.0),
        ("mooncake_conversation_h1.b512.jsonl.gz", 512, 300, 12, 500, 10_000.0),
    ],
)
def test_it_agrees_with_the_judge(
    agreement: ModuleType,
    tmp_path: Path,
    name: str,
    block_size: int,
    lines: int,
    workers: int,
    blocks: int,
    rate: float,
) -> None:
    """Same draws, same model: not only close but equal. Memory is short, so eviction counts too."""
    path = cut(name, lines, tmp_path)
    trace = load_trace(path, block_size)
    assert blocks >= trace.most_blocks + 8, "else the judge takes more"
    flags = f"-N {workers} --caps {blocks * block_size} --loads 0.8 -P {rate} --seed 3".split()
    judged: dict[str, dict[str, Any]] = agreement.judged(path, list(agreement.SAME), flags)
    model = WorkerModel(kv_blocks=blocks, prefill_tokens_per_s=rate)
    ours = simulate(name, trace, model, workers, agreement.SAME, load=0.8, seed=3)
    assert ours.bounds.infinite_hit_rate == pytest.approx(judged["random"]["inf_hit"])
    assert ours.bounds.pooled_hit_rate == pytest.approx(judged["random"]["lru"])
    assert ours.bounds.ttft_pooled.p99_s == pytest.approx(judged["random"]["ref_p99"])
    assert ours.bounds.ttft_infinite.mean_s == pytest.approx(judged["random"]["pool_mean"])
    assert ours.bounds.ttft_alone.mean_s == pytest.approx(judged["random"]["own_mean"])
    for result in ours.policies:
        other = judged[result.policy]
        assert result.hit_rate == pytest.approx(other["hit"]), result.policy
        assert result.ttft.mean_s == pytest.approx(other["mean"]), result.policy
        assert result.ttft.p99_s == pytest.approx(other["p99"]), result.policy
        assert result.busiest_work == pytest.approx(other["imb"]), result.policy


def test_one_seed_gives_one_result_and_seeds_differ() -> None:
    def told(seed: int) -> str:
        model = WorkerModel(kv_blocks=40)
        return to_json(simulate("t", CHATS, model, 3, FACTORIES, load=0.8, seed=seed))

    assert told(5) == told(5)
    assert told(5) != told(6)


PROMPT = st.lists(st.integers(0, 3), min_size=0, max_size=6)
REQUEST = st.tuples(st.integers(0, 3000), PROMPT, st.integers(0, 15), st.integers(1, 60))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A few requests with much in common, with or without sessions, of any block size."""
    block_size = draw(st.sampled_from([4, 16, 24, 32]))
    closed = draw(st.booleans())
    rows = []
    for at, ids, rest, output in sorted(draw(st.lists(REQUEST, min_size=1, max_size=25))):
        told = row(at, len(ids) * block_size + min(rest, block_size - 1), output, ids)
        rows.append(told | {"session_id": sum(ids[:1])} if closed else told)
    return read_trace(encoded(rows), block_size)


@settings(max_examples=40, deadline=None)
@given(trace=traces(), policy=st.sampled_from(sorted(FACTORIES)), workers=st.integers(1, 4))
def test_nothing_is_lost_and_no_policy_beats_the_bounds(
    trace: Trace, policy: str, workers: int
) -> None:
    model = WorkerModel(kv_blocks=trace.most_blocks + 3, prefill_tokens_per_s=500.0)

    def run() -> Replay:
        return Replay(trace, model, workers, FACTORIES[policy], 0.5, 1)

    replay = run()
    done: list[int] = []
    served = replay.run(done.append)
    replay.check()
    assert done == list(range(1, len(trace.requests) + 1))
    assert served == run().run()
    for request, ttft, cached in zip(
        trace.requests, served.ttft_s, served.cached_tokens, strict=True
    ):
        assert 0 <= cached < request.input_tokens
        alone = model.prefill_s(request.input_tokens - cached, request.input_tokens)
        assert ttft >= alone - 1e-9
    if trace.sessions is None:  # in a closed loop the order of requests is the policy's
        assert sum(served.cached_tokens) <= sum(infinite_hits(trace))


def test_a_sessions_next_turn_waits_for_the_answer() -> None:
    rows = [
        row(0, 20, 10, [1, 2], session_id=1),
        row(1, 20, 10, [1, 2], session_id=1),
    ]
    model = WorkerModel(kv_blocks=8, prefill_tokens_per_s=10.0, token_s=1.0)
    replay = Replay(read_trace(encoded(rows), 16), model, 2, FACTORIES["cost"], 1.0, 1)
    served = replay.run()
    assert served.cached_tokens == [0, 16]
    assert served.worker[0] == served.worker[1]
    assert served.end_s > 2 * 10 * 1.0


def test_the_pooled_cache_forgets_leaves_first() -> None:
    rows = [row(n, 48, 1, ids) for n, ids in enumerate([[1, 2, 3], [4, 5, 6], [1, 2, 3]])]
    trace = read_trace(encoded(rows), 16)
    assert infinite_hits(trace) == [0, 0, 47]
    assert pooled_hits(trace, 6) == [0, 0, 47]
    assert pooled_hits(trace, 5) == [0, 0, 32]
    assert pooled_hits(trace, 3) == [0, 0, 0]


def test_the_queue_and_the_scale() -> None:
    rows = [row(1000 * n, 100, 1, [n] * 7) for n in range(3)]
    trace = read_trace(encoded(rows), 16)
    model = WorkerModel(kv_blocks=8, prefill_tokens_per_s=100.0, overhead_s=0.0)
    assert queue_ttft(trace, [0, 0, 0], model, 1, 0.5) == pytest.approx([1.0, 1.5, 2.0])
    assert queue_ttft(trace, [0, 0, 50], model, 2, 0.5) == pytest.approx([1.0, 1.0, 0.5])
    assert time_scale(trace, model, 2, 0.75) == pytest.approx(3.0 / (2 * 0.75) / 2.0)
    bounds = bounds_of(trace, model, 2, time_scale(trace, model, 2, 0.75))
    assert bounds.utilisation == pytest.approx(0.75)


def test_percentiles_lie_between_neighbours() -> None:
    assert [percentile([1.0, 2.0, 4.0], share) for share in (0.0, 0.25, 0.5, 1.0)] == [
        1.0,
        1.5,
        2.0,
        4.0,
    ]
    assert percentile([3.0], 0.99) == 3.0
