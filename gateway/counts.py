"""Counters and histograms of the hot path, shown through prometheus-client.

Its own counters take a lock and several calls per value, a fifth of a request's time here. These
are plain dictionaries, touched by the event loop's thread only; the library asks for them when
somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

Labels = tuple[str, ...]


class Counts(Collector):
    """A counter with labels."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        *labels: str,
        lasts: Callable[[Labels], bool] | None = None,
    ) -> None:
        """``lasts``: asked at each scrape; series for which it is false are forgotten."""
        self._name, self._text, self._labels = name, text, labels
        self._lasts = lasts
        self._values: dict[Labels, float] = {}
        registry.register(self)

    def add(self, labels: Labels, by: float = 1) -> None:
        """Count ``by`` (>= 0)."""
        values = self._values
        values[labels] = values.get(labels, 0) + by

    def collect(self) -> Iterable[Metric]:
        """See :class:`Collector`."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        if (lasts := self._lasts) is not None:
            self._values = {k: value for k, value in self._values.items() if lasts(k)}
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return [family]


class Series:
    """One histogram: counts by bucket, and the sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Take in one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


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
        self._series: dict[Labels, Series] = {}
        if not labels:
            self.series()
        registry.register(self)

    def series(self, *labels: str) -> Series:
        """The one with these labels; shown once it has a value, that without labels at once."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = Series(self._bounds)
        return series

    def observe(self, value: float, labels: Labels = ()) -> None:
        """Take in one value; who does so often keeps the :meth:`series`."""
        self.series(*labels).observe(value)

    def collect(self) -> Iterable[Metric]:
        """See :class:`Collector`."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        ends = [*(str(bound) for bound in self._bounds), "+Inf"]
        for labels, series in self._series.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for end, count in zip(ends, series.counts, strict=True):
                total += count
                buckets.append((end, total))
            if total or not labels:
                family.add_metric(labels, buckets, series.total)
        return [family]
