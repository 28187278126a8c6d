"""The metrics of several processes as those of one gateway. Pure.

Counters and histograms are summed, and what a process that died had counted stays in the sum: a sum
that fell would look like a restart of the whole gateway. Gauges follow :data:`RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample."""


def _first(present: float, _: float) -> float:
    return present


def _sum(present: float, other: float) -> float:
    return present + other


RULES: dict[str, Callable[[float, float], float]] = {
    "headwater_inflight": _sum,
    "headwater_queue_depth": _sum,
    "process_resident_memory_bytes": _sum,
    "process_virtual_memory_bytes": _sum,
    "process_open_fds": _sum,
    "process_start_time_seconds": min,
    "process_max_fds": min,
    "headwater_redis_up": min,
    "headwater_discovery_up": min,
    # One value of several is 1: taken from one process, or there would be two.
    "headwater_worker_state": _first,
    "headwater_worker_trust": _first,
    "headwater_worker_parity": _first,
}
"""By gauge. Of the others (index blocks and lag) each holds the same: the largest counts."""
COUNTED = ("counter", "histogram")


@dataclass(slots=True)
class _Family:
    text: str
    kind: str
    values: dict[Key, float] = field(default_factory=dict)

    def add(
        self, values: Iterable[tuple[Key, float]], rule: Callable[[float, float], float]
    ) -> None:
        for key, value in values:
            present = self.values.get(key)
            self.values[key] = value if present is None else rule(present, value)


_Families = dict[str, _Family]


class Totals:
    """What was read of each process last, and what those had counted that are gone."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, _Families]] = {}
        self._gone: _Families = {}

    def take(self, process: int, life: int, metrics: Iterable[Metric]) -> None:
        """What a process shows now; ``life`` is another one after each restart."""
        known = self._last.get(process)
        if known is not None and known[0] != life:
            _add(self._gone, {n: f for n, f in known[1].items() if f.kind in COUNTED})
        self._last[process] = (life, _read(metrics))

    def merged(self, present: Sequence[int]) -> list[Metric]:
        """All together. ``present``: the processes whose gauges count, the most senior first."""
        merged: _Families = {}
        for process in present:
            _add(merged, self._last[process][1])
        for process, (_, families) in self._last.items():
            if process not in present:
                _add(merged, {n: f for n, f in families.items() if f.kind in COUNTED})
        _add(merged, self._gone)
        return [_metric(name, family) for name, family in merged.items()]


def _read(metrics: Iterable[Metric]) -> _Families:
    return {
        metric.name: _Family(
            metric.documentation,
            metric.type,
            {(s.name, tuple(s.labels.items())): s.value for s in metric.samples},
        )
        for metric in metrics
    }


def _add(into: _Families, families: _Families) -> None:
    for name, family in families.items():
        mine = into.setdefault(name, _Family(family.text, family.kind))
        mine.add(family.values.items(), _sum if family.kind in COUNTED else RULES.get(name, max))


def _metric(name: str, family: _Family) -> Metric:
    metric = Metric(name, family.text, family.kind)
    values = family.values.items()
    metric.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in values]
    if family.kind == "histogram":
        # The buckets of a series stand together and rise, whichever process had it first.
        metric.samples.sort(key=_series)
    return metric


def _series(sample: Sample) -> tuple[list[tuple[str, str]], str, float]:
    labels = dict(sample.labels)
    end = labels.pop("le", None)
    return sorted(labels.items()), sample.name, math.inf if end is None else float(end)
