"""Metrics: names are a contract, labels are bounded, only measured hits count as hits."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gateway.index.stats import FeedStats
from gateway.records import Outcome, RequestRecord, TokenFlow
from gateway.retries import FREE, RetryBudget
from gateway.telemetry import FleetCollector, PrometheusSink, hit_depth

NAMES = """
requests_total attempts_total prompt_tokens_total overlap_tokens_total loss_tokens_total
ttft_seconds itl_seconds request_seconds decision_seconds overhead_seconds inflight queue_depth
worker_state worker_trust prediction_error_tokens index_blocks index_host_blocks index_lag_seconds
redis_up retries_total shed_total
""".split()

FLOW = TokenFlow(
    prompt=100,
    tail=4,
    cold=32,
    available=64,
    captured=48,
    diverted_for_load=16,
    delivered=32,
    stale_index=16,
)


class NoRouter:
    """A router without workers."""

    def workers(self, now: float) -> list[object]:
        return []


def record(**fields: object) -> RequestRecord:
    base = {
        "at": 1.0,
        "request_id": "r",
        "attempt": 1,
        "final": True,
        "route": "/v1/completions",
        "model": "m",
        "worker": "w",
        "flow": FLOW,
        "ttft_s": 0.2,
        "itl_s": 0.01,
        "total_s": 1.0,
        "reported": True,
    }
    return RequestRecord(**{**base, **fields})  # type: ignore[arg-type]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def sink(registry: CollectorRegistry) -> PrometheusSink:
    return PrometheusSink(registry, lambda model: model == "m")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"headwater_{name}", labels)


def test_every_name_is_there(registry: CollectorRegistry, sink: PrometheusSink) -> None:
    registry.register(FleetCollector(NoRouter(), FeedStats()))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    for name in NAMES:
        assert f"# TYPE headwater_{name} " in text, name


def test_a_record_is_counted_once(registry: CollectorRegistry, sink: PrometheusSink) -> None:
    sink.record(record())
    assert value(registry, "attempts_total", worker="w", outcome="ok") == 1
    assert value(registry, "prompt_tokens_total", model="m", source="cached") == 32
    assert value(registry, "prompt_tokens_total", model="m", source="computed") == 68
    assert value(registry, "overlap_tokens_total", model="m", stage="captured") == 48
    assert value(registry, "loss_tokens_total", model="m", reason="stale_index") == 16
    assert value(registry, "ttft_seconds_count", model="m", hit="partial") == 1
    assert value(registry, "prediction_error_tokens_sum") == 16


def test_only_final_attempts_count_tokens(
    registry: CollectorRegistry, sink: PrometheusSink
) -> None:
    sink.record(record(final=False, outcome=Outcome.UPSTREAM_ERROR))
    sink.record(record(attempt=0, outcome=Outcome.REJECTED, worker=""))
    assert value(registry, "attempts_total", worker="w", outcome="upstream_error") == 1
    assert value(registry, "attempts_total", worker="", outcome="rejected") is None
    assert value(registry, "prompt_tokens_total", model="m", source="computed") is None


def test_unknown_models_share_a_label(registry: CollectorRegistry, sink: PrometheusSink) -> None:
    for n in range(10):
        sink.request("/v1/completions", f"x{n}", 404)
    labels = {"route": "/v1/completions", "model": "unknown", "code": "404"}
    assert value(registry, "requests_total", **labels) == 10


@pytest.mark.parametrize(
    ("delivered", "depth"), [(0, "none"), (32, "partial"), (96, "full"), (97, "full")]
)
def test_hit_depth_is_what_was_measured(delivered: int, depth: str) -> None:
    assert hit_depth(TokenFlow(prompt=100, tail=4, captured=96, delivered=delivered)) == depth


def test_retries_are_free_while_answers_succeed() -> None:
    budget = RetryBudget()
    for _ in range(10 * FREE):
        assert budget.take(1)
        budget.success()


def test_retries_are_a_tenth_of_requests_in_an_outage() -> None:
    budget = RetryBudget()
    taken = 0
    for _ in range(1000):
        budget.request()
        taken += budget.take(1)
    assert taken <= FREE + 101
    last = 0
    for _ in range(1000):
        budget.request()
        last += budget.take(1)
    assert 90 <= last <= 100


def test_a_fault_with_many_requests_in_flight_costs_none() -> None:
    budget = RetryBudget()
    assert all(budget.take(500) for _ in range(500))
