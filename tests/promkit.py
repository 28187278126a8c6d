"""The registries of gateway and worker with every series filled, and a reader of PromQL's names.

No PromQL engine: an expression is cut into selectors, label lists and functions, and each is held
against what a scrape gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from routerkit import Rig

from gateway.discovery.base import Source
from gateway.feedmetrics import FeedCollector
from gateway.feeds.sources import SourceState
from gateway.index.stats import FeedStats
from gateway.records import Outcome, RequestRecord, TokenFlow
from gateway.telemetry import FleetCollector, PrometheusSink
from worker.generation import EngineStats, StepRecord
from worker.metrics import WorkerMetrics

Series = dict[str, dict[str, set[str]]]
"""By sample name: the values of each label."""

OPEN = frozenset({"model", "worker", "code", "route", "priority", "instance", "job"})
"""Labels whose values the deployment makes; of all others the values are checked."""
TARGET = frozenset({"instance", "job"})
FUNCTIONS = frozenset("sum max count rate increase histogram_quantile max_over_time vector".split())
WORDS = frozenset({"by", "on", "and", "or", "unless"})
_SELECTOR = re.compile(r"\b(headwater_\w+|up|ALERTS)\b(?:\{([^}]*)\})?(?:\[([^\]]+)\])?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_LISTS = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_COUNTED = ("_total", "_bucket", "_sum", "_count")


def scraped() -> Series:
    """What the two kinds of target show when everything has happened once."""
    found: Series = {}
    registry = CollectorRegistry()
    _gateway(registry)
    stats = EngineStats()
    worker = WorkerMetrics(lambda: stats, lambda: (1, 0))
    for kind in ("prefill", "decode", "mixed"):
        worker.on_step(StepRecord(kind, 0.01, 4, 1))
    families = [*registry.collect(), *text_string_to_metric_families(worker.text().decode())]
    for family in families:
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def _gateway(registry: CollectorRegistry) -> None:
    rig = Rig(workers=1)
    lists = [SourceState(source) for source in Source]
    stats = FeedStats()
    registry.register(FeedCollector(stats))
    registry.register(FleetCollector(rig.router, stats, lambda: 100.0, lists=lambda: lists))
    sink = PrometheusSink(registry, lambda model: True)
    sink.request("/v1/completions", "m", 200)
    sink.retry("refused")
    sink.shed("no_worker")
    sink.waited(0.0)
    sink.overhead(0.001)
    for stage in ("parse", "tokenize", "hash", "lookup", "rank"):
        sink.stage(stage)(0.001)
    fields = set(TokenFlow.__struct_fields__) - {"prompt", "tail"}
    flow: dict[str, int] = dict.fromkeys(fields, 8) | {"prompt": 64, "tail": 1}
    for delivered in (0, 8, 64):
        for outcome in Outcome:
            values: dict[str, Any] = {"ttft_s": 0.1, "itl_s": 0.01, "reported": True}
            record = RequestRecord(
                at=0.0,
                request_id="r",
                attempt=1,
                final=True,
                route="/",
                model="m",
                worker="w",
                outcome=outcome,
                flow=TokenFlow(**(flow | {"delivered": delivered})),
                **values,
            )
            sink.record(record)


def faults(expression: str, series: Series) -> Iterator[str]:
    """What in an expression no scrape of ours would answer, and what is no PromQL at all."""
    plain = re.sub(r'"[^"]*"', '""', expression)
    if plain.count("(") != plain.count(")") or plain.count("{") != plain.count("}"):
        yield "brackets do not close"
    labels = set(TARGET)
    selectors = list(_SELECTOR.finditer(expression))
    if not any(found[1].startswith(("headwater_", "up", "ALERTS")) for found in selectors):
        yield "selects nothing"
    for name, matchers, window in (found.groups() for found in selectors):
        if name.startswith("headwater_"):
            labels |= series.get(name, {}).keys()
            yield from _selected(name, matchers or "", window, series)
    for name in re.findall(r"\b(?:rate|increase)\((headwater_\w+)", expression):
        if not name.endswith(_COUNTED):
            yield f"{name} is a gauge and has no rate"
    for listed in _LISTS.findall(expression):
        for label in re.split(r",\s*", listed):
            if label not in labels:
                yield f"no metric here has the label {label}"
    bare = _LISTS.sub(" ", _SELECTOR.sub(" ", expression))
    for word in re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", bare)):
        if word not in FUNCTIONS | WORDS:
            yield f"{word} is no function"


def _selected(name: str, matchers: str, window: str | None, series: Series) -> Iterator[str]:
    if name not in series:
        yield f"there is no {name}"
        return
    if window is None and name.endswith(_COUNTED):
        yield f"{name} counts from the start and needs a rate"
    yield from _matched(name, matchers, series[name])


def _matched(name: str, matchers: str, labels: dict[str, set[str]]) -> Iterator[str]:
    read = _MATCHER.findall(matchers)
    if ",".join("".join((n, op, f'"{v}"')) for n, op, v in read) != matchers.replace(", ", ","):
        yield f"{name}: cannot read {matchers}"
    for label, operator, value in read:
        if label not in labels and label not in TARGET:
            yield f"{name} has no label {label}"
        elif label not in OPEN:
            for one in value.split("|") if "~" in operator else [value]:
                if one not in labels[label]:
                    yield f"{name}: {label} is never {one}"
