"""Prometheus metrics of one worker: totals are read from the engine at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shared.lifetimes import Distribution
from worker.generation import EngineStats, StepRecord

STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class _EngineTotals(Collector):
    """``headwater_engine_*`` from the engine's own counters."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Nothing while the model is being loaded."""
        stats = self._stats()
        if stats is None:
            return
        yield GaugeMetricFamily(
            "headwater_engine_running", "Sequences being computed.", value=stats.running
        )
        yield GaugeMetricFamily(
            "headwater_engine_waiting", "Requests waiting to be admitted.", value=stats.waiting
        )
        blocks = GaugeMetricFamily(
            "headwater_engine_kv_blocks", "KV blocks by state.", labels=["state"]
        )
        blocks.add_metric(["used"], stats.blocks_used)
        blocks.add_metric(["cached"], stats.blocks_cached)
        blocks.add_metric(["free"], stats.blocks_free)
        yield blocks
        prefill = CounterMetricFamily(
            "headwater_engine_prefill_tokens",
            "Prompt tokens by where their KV came from.",
            labels=["source"],
        )
        prefill.add_metric(["cached"], stats.prefill_cached_tokens)
        prefill.add_metric(["computed"], stats.prefill_computed_tokens)
        prefill.add_metric(["recomputed"], stats.prefill_recomputed_tokens)
        yield prefill
        yield CounterMetricFamily(
            "headwater_engine_decode_tokens", "Tokens generated.", value=stats.decode_tokens
        )
        yield CounterMetricFamily(
            "headwater_engine_preemptions",
            "Sequences that gave their blocks back and are computed again.",
            value=stats.preemptions,
        )
        yield CounterMetricFamily(
            "headwater_engine_deadlines",
            "Requests ended because their deadline passed.",
            value=stats.deadlines,
        )
        yield from _host_tier(stats)
        yield from _lifetimes(stats)


def _host_tier(stats: EngineStats) -> Iterable[Metric]:
    blocks = GaugeMetricFamily(
        "headwater_engine_host_blocks", "Slots for KV blocks in host memory.", labels=["state"]
    )
    blocks.add_metric(["used"], stats.host_blocks_used)
    blocks.add_metric(["free"], stats.host_blocks_free)
    yield blocks
    yield CounterMetricFamily(
        "headwater_engine_host_tokens",
        "Prompt tokens loaded from host memory; a part of the cached ones.",
        value=stats.host_tokens,
    )
    moved = CounterMetricFamily(
        "headwater_engine_host_moved_blocks", "KV blocks to and from host memory.", labels=["way"]
    )
    moved.add_metric(["out"], stats.host_blocks_moved_out)
    moved.add_metric(["in"], stats.host_blocks_moved_in)
    moved.add_metric(["dropped"], stats.host_blocks_dropped)
    yield moved


def _lifetimes(stats: EngineStats) -> Iterable[Metric]:
    blocks = stats.lifetimes
    for name, text, values in (
        ("lifetime_seconds", "From being cached to eviction of a KV block.", blocks.age_s),
        ("idle_before_evict_seconds", "From the last use to eviction.", blocks.idle_s),
        ("reuse_gap_seconds", "Between two uses of a KV block.", blocks.gap_s),
        ("reuses", "Uses of a KV block before it was evicted.", blocks.uses),
    ):
        yield HistogramMetricFamily(
            f"headwater_engine_block_{name}", text, buckets=_buckets(values), sum_value=values.total
        )


def _buckets(values: Distribution) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus wants them."""
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(values.counts or (0,))), strict=True))


class _AdapterCounts(Collector):
    """``headwater_engine_adapters``."""

    def __init__(self, counts: Callable[[], tuple[int, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """By state: names of adapters are no labels."""
        served, leaving = self._counts()
        family = GaugeMetricFamily(
            "headwater_engine_adapters", "LoRA adapters in memory.", labels=["state"]
        )
        family.add_metric(["served"], served)
        family.add_metric(["leaving"], leaving)
        yield family


class WorkerMetrics:
    """One registry; ``on_step`` may be called from the engine thread."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        adapters: Callable[[], tuple[int, int]],
    ) -> None:
        """``adapters``: how many are served, and how many leave."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineTotals(stats))
        self._registry.register(_AdapterCounts(adapters))
        ProcessCollector(registry=self._registry)
        self._step_seconds = Histogram(
            "headwater_engine_step_seconds",
            "Duration of a forward pass.",
            ["kind"],
            registry=self._registry,
            buckets=STEP_BUCKETS,
        )
        self._batch_tokens = Histogram(
            "headwater_engine_batch_tokens",
            "Tokens computed in a forward pass.",
            registry=self._registry,
            buckets=TOKEN_BUCKETS,
        )

    def on_step(self, record: StepRecord) -> None:
        """Count one forward pass."""
        self._step_seconds.labels(record.kind).observe(record.seconds)
        self._batch_tokens.observe(record.tokens)

    def text(self) -> bytes:
        """The exposition in Prometheus' text form."""
        return generate_latest(self._registry)
