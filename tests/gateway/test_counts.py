"""Counters and histograms: what a scrape sees is what has happened until then."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from gateway.counts import Counts, Distribution
from gateway.records import RequestRecord, TokenFlow
from gateway.telemetry import FOLD_EVERY, PrometheusSink

BOUNDS = (0.0, 0.1, 1.0, 10.0)


def shown(registry: CollectorRegistry, name: str) -> Any:
    return registry.get_sample_value(name)


@given(st.lists(st.lists(st.floats(0, 20) | st.sampled_from(BOUNDS))))
def test_a_histogram_is_as_if_each_value_had_been_sorted_in_at_once(reads: Any) -> None:
    registry = CollectorRegistry()
    times = Distribution(registry, "t", "Text.", BOUNDS)
    buckets, total = [0] * (len(BOUNDS) + 1), 0.0
    for values in reads:
        for value in values:
            times.observe(value)
            buckets[bisect_left(BOUNDS, value)] += 1
            total += value
        if len(values) % 2:
            times.fold()
        assert shown(registry, "t_sum") == total
        assert shown(registry, "t_count") == sum(buckets)
        for at, bound in enumerate(BOUNDS):
            told = registry.get_sample_value("t_bucket", {"le": str(bound)})
            assert told == sum(buckets[: at + 1])


def test_a_series_that_is_kept_counts_where_others_count() -> None:
    registry = CollectorRegistry()
    counts = Counts(registry, "c", "Text.", "code")
    kept = counts.series["200",]
    assert registry.get_sample_value("c_total", {"code": "200"}) == 0
    kept.value += 2
    counts.add(("200",), 3)
    assert counts.series["200",] is kept
    assert registry.get_sample_value("c_total", {"code": "200"}) == 5


def record(**fields: Any) -> RequestRecord:
    plain: dict[str, Any] = {
        "at": 1.0, "request_id": "r", "attempt": 1, "final": True, "route": "/v1/chat/completions",
        "model": "m", "worker": "w", "total_s": 0.5,
    }  # fmt: skip
    return RequestRecord(**{**plain, **fields})


def test_each_scrape_sees_every_request_until_then() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, lambda model: model == "m")
    parse = sink.stage("parse")
    for number in range(1, FOLD_EVERY * 2 + 3):
        parse(1e-4)
        sink.waited(0.0)
        sink.record(record())
        sink.request("/v1/chat/completions", "m", 200)
        if number % 100 and number % FOLD_EVERY > 2:
            continue
        labels = {"model": "m"}
        told = registry.get_sample_value
        assert told("headwater_decision_seconds_count", {"stage": "parse"}) == number
        assert told("headwater_queue_seconds_count") == number
        assert told("headwater_request_seconds_count", labels) == number
        assert told("headwater_request_seconds_sum", labels) == 0.5 * number


def test_what_no_scrape_reads_does_not_pile_up() -> None:
    sink = PrometheusSink(CollectorRegistry(), lambda model: True)
    series = sink.total.series("m")
    longest = 0
    for _ in range(3 * FOLD_EVERY):
        sink.record(record())
        sink.request("/v1/chat/completions", "m", 200)
        longest = max(longest, len(series._values))
    assert 0 < longest <= FOLD_EVERY


def test_series_appear_with_their_first_value_only() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, lambda model: model == "m")
    sink.request("/v1/chat/completions", "m", 200)
    told = generate_latest(registry).decode()
    assert 'headwater_requests_total{code="200",model="m",route="/v1/chat/completions"} 1.0' in told
    for absent in ("prompt_tokens_total{", "ttft_seconds_bucket{", "lookups_total{"):
        assert f"headwater_{absent}" not in told
    sink.record(record(flow=TokenFlow(prompt=5, tail=5)))
    told = generate_latest(registry).decode()
    assert 'headwater_prompt_tokens_total{model="m",source="cached"} 0.0' in told
    assert 'headwater_prompt_tokens_total{model="m",source="computed"} 5.0' in told
    assert "headwater_ttft_seconds_bucket{" not in told


def test_a_model_that_comes_later_gets_series_of_its_own() -> None:
    registry, known = CollectorRegistry(), set[str]()
    sink = PrometheusSink(registry, known.__contains__)
    for _ in range(2):
        sink.request("/v1/chat/completions", "late", 404)
    known.add("late")
    sink.request("/v1/chat/completions", "late", 200)
    for model, code, count in (("unknown", "404", 2), ("late", "200", 1)):
        labels = {"route": "/v1/chat/completions", "model": model, "code": code}
        assert registry.get_sample_value("headwater_requests_total", labels) == count
