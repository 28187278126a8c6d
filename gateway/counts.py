"""Counters and histograms of the hot path, shown through prometheus-client.

Its own counters take a lock and several calls per value, a fifth of a request's time here. These
are plain dictionaries, touched by the event loop's thread only; the library asks for them when
somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

Labels = tuple[str, ...]


class Counts(Collector):
    """A counter with labels."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[Labels, float] = {}
        registry.register(self)

    def add(self, labels: Labels, by: float = 1) -> None:
        """Count ``by`` (>= 0)."""
        values = self._values
        values[labels] = values.get(labels, 0) + by

    def collect(self) -> Iterable[Metric]:
        """See :class:`Collector`."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return [family]


class Distribution(Collector):
    """A histogram with labels."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        bounds: Sequence[float],
        *labels: str,
    ) -> None:
        """``bounds``: upper ends of the buckets, rising; one without an end is added."""
        self._name, self._text, self._labels = name, text, labels
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        if not labels:
            self._series(())  # a metric without labels is there from the start
        registry.register(self)

    def observe(self, value: float, labels: Labels = ()) -> None:
        """Take in one value."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._series(labels)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def _series(self, labels: Labels) -> list[int]:
        counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
        self._sums[labels] = 0.0
        return counts

    def collect(self) -> Iterable[Metric]:
        """See :class:`Collector`."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        ends = [*(str(bound) for bound in self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for end, count in zip(ends, counts, strict=True):
                total += count
                buckets.append((end, total))
            family.add_metric(labels, buckets, self._sums[labels])
        return [family]
