"""Counters of the background side in Prometheus form, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.index.stats import FeedStats

ENGINE = "engine_"
ENGINE_COUNTS = ("frames", "gaps", "replays", "losses", "restarts")
BAD = ("malformed_frames", "malformed_events", "unknown_events")


class FeedCollector(Collector):
    """What became of the event streams of engines of other makes."""

    def __init__(self, stats: FeedStats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        counts = CounterMetricFamily(
            "headwater_engine_stream",
            "What happened on event streams of other engines.",
            labels=["what"],
        )
        for name in (*(ENGINE + count for count in ENGINE_COUNTS), *BAD):
            counts.add_metric([name.removeprefix(ENGINE)], getattr(self._stats, name))
        streams = GaugeMetricFamily("headwater_engine_streams", "Event streams that are followed.")
        streams.add_metric([], self._stats.engine_feeds)
        return [counts, streams]
