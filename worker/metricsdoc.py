"""The worker's metric families without a model, for ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from worker.generation import EngineStats, StepRecord
from worker.metrics import WorkerMetrics


def families() -> tuple[Iterable[Metric], dict[str, str]]:
    """All families, and the values of their labels."""
    stats = EngineStats()
    metrics = WorkerMetrics(lambda: stats, lambda: (0, 0))
    for kind in ("prefill", "decode", "mixed"):
        metrics.on_step(StepRecord(kind, 0.0, 0, 0))
    found = [
        family
        for family in text_string_to_metric_families(metrics.text().decode())
        if not family.name.endswith("_created")
    ]
    values: dict[str, dict[str, None]] = {}
    for family in found:
        name = family.name.removeprefix("headwater_")
        name += "_total" if family.type == "counter" else ""
        for sample in family.samples:
            for label, value in sample.labels.items():
                values.setdefault(f"{name}.{label}", {})[value] = None
    return found, {name: ", ".join(known) for name, known in values.items()}
