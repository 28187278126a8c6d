"""Percentiles with what they are worth. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, sqrt
from statistics import fmean, stdev

import msgspec

_Z = 1.96
"""Normal quantile of a two-sided 95 %."""


class Estimate(msgspec.Struct, frozen=True):
    """A figure and its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Times(msgspec.Struct, frozen=True):
    """A distribution of seconds."""

    count: int
    mean: Estimate
    p50: Estimate
    p90: Estimate
    p99: Estimate


def times_of(values: Sequence[float]) -> Times | None:
    """None for no values."""
    if not values:
        return None
    ranked = sorted(values)
    return Times(
        len(ranked),
        mean_of(ranked),
        *(quantile_of(ranked, share) for share in (0.5, 0.9, 0.99)),
    )


def mean_of(values: Sequence[float]) -> Estimate:
    """At least one value."""
    mean = fmean(values)
    half = _Z * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(mean, mean - half, mean + half)


def quantile_of(ranked: Sequence[float], share: float) -> Estimate:
    """Of sorted values; the interval is between two of them, by the binomial distribution."""
    n = len(ranked)
    place = share * (n - 1)
    low, high = floor(place), ceil(place)
    value = ranked[low] + (ranked[high] - ranked[low]) * (place - low)
    half = _Z * sqrt(n * share * (1 - share))
    first = ranked[max(0, floor(n * share - half))]
    last = ranked[min(n - 1, ceil(n * share + half))]
    return Estimate(value, min(first, value), max(last, value))
