"""Counters and histograms of the hot path, shown through prometheus-client.

Its own counters take a lock and several calls per value, a fifth of a request's time here. These
are plain values, touched by the event loop's thread only; the library asks for them when somebody
scrapes. A histogram only puts down what it is told, and sorts it into its buckets when it is read
or when that has become much.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

Labels = tuple[str, ...]


class Count:
    """One series of a counter: add to ``value``."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class _Found(dict[Labels, Count]):
    """Series that are there as soon as they are looked at."""

    def __missing__(self, labels: Labels) -> Count:
        made = self[labels] = Count()
        return made


class Counts(Collector):
    """A counter with labels: ``counts.series["a", "b"].value += 1``."""

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
        self.series = _Found()
        """By labels; one is shown from when it was first asked for. Keep none that may not last."""
        registry.register(self)

    def add(self, labels: Labels, by: float = 1) -> None:
        """Count ``by`` (>= 0)."""
        self.series[labels].value += by

    def collect(self) -> Iterable[Metric]:
        """See :class:`Collector`."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        if (lasts := self._lasts) is not None:
            for labels in [labels for labels in self.series if not lasts(labels)]:
                del self.series[labels]
        for labels, count in self.series.items():
            family.add_metric(labels, count.value)
        return [family]


class Series:
    """One histogram: counts by bucket, and the sum."""

    __slots__ = ("_bounds", "_count", "_total", "_up_to", "_values", "observe")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._up_to = [0] * len(bounds)
        """Values up to each bound."""
        self._count, self._total = 0, 0.0
        self._values: list[float] = []
        """Those that are in neither yet."""
        self.observe: Callable[[float], None] = self._values.append
        """Takes in one value: nothing but a place in a list, since each request has many."""

    def fold(self) -> None:
        """Sort in what was observed."""
        values = self._values
        if not values:
            return
        self._total = sum(values, self._total)
        values.sort()
        for at, bound in enumerate(self._bounds):
            self._up_to[at] += bisect_right(values, bound)
        self._count += len(values)
        values.clear()

    def read(self) -> tuple[list[int], float]:
        """How many values are up to each bound, and up to infinity; their sum."""
        self.fold()
        return [*self._up_to, self._count], self._total


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

    def fold(self) -> None:
        """Let no series hold much that is not sorted in."""
        for series in self._series.values():
            series.fold()

    def collect(self) -> Iterable[Metric]:
        """See :class:`Collector`."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        ends = [*(str(bound) for bound in self._bounds), "+Inf"]
        for labels, series in self._series.items():
            counts, total = series.read()
            if counts[-1] or not labels:
                family.add_metric(labels, list(zip(ends, counts, strict=True)), total)
        return [family]
