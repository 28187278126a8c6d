"""What is measured, and the Prometheus form of it. Names are a public contract.

Label sets are bounded: a model label is a model that some live worker has, or ``unknown``; routes,
outcomes and reasons come from fixed sets. Counters are fed by records; gauges are read from the
router and the feeds when somebody scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.counts import Count, Counts, Distribution
from gateway.decision import WorkerStatus
from gateway.feeds.sources import SourceState
from gateway.index.stats import FeedStats
from gateway.parity import Verdict
from gateway.records import REJECTED, RequestRecord, TokenFlow
from gateway.router import Router
from gateway.routing.base import Trust, WorkerState

LOSSES = (
    "evicted",
    "diverted_for_load",
    "draining",
    "policy",
    "isolation",
    "stale_index",
    "token_mismatch",
    "unreported",
)
STAGES = ("available", "captured", "delivered")
_LOST, _STAGED = attrgetter(*LOSSES), attrgetter(*STAGES)
UNKNOWN = "unknown"
OTHER = "other"
MOST_URGENT = 5
"""Priorities beyond 5 and -5 share the labels of these."""
MAX_WORKERS = 2048
"""So many workers get series of their own at a time."""
FOLD_EVERY = 512
"""After so many requests histograms sort in what they were told, if nobody has read them."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_SHORT = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25)
_TOKENS = (0, 1, 16, 64, 256, 1024, 4096, 16384)


class RecordSink(Protocol):
    """Takes the record of each attempt. Must neither block nor raise."""

    def record(self, record: RequestRecord) -> None:
        """Keep or count it."""
        ...


DEPTHS = ("none", "partial", "full")


def hit_depth(flow: TokenFlow) -> str:
    """``full`` if every block that can match came from the cache, as the engine reported."""
    if flow.delivered == 0:
        return "none"
    return "full" if flow.delivered >= flow.prompt - flow.tail else "partial"


def lookup(flow: TokenFlow) -> str:
    """What the look-up of a request's prefix came to: why affinity worked, or did not. Pure."""
    if flow.prompt <= flow.tail:
        return "too_short"
    if flow.available <= flow.isolation:
        return "nothing_known"
    return "chosen" if flow.captured else "not_chosen"


class _OfModel:
    """What is counted of one model: series that are found once."""

    __slots__ = ("itl", "label", "prompt", "total", "ttft")

    def __init__(self, sink: PrometheusSink, label: str) -> None:
        self.label = label
        self.total, self.itl = sink.total.series(label).observe, sink.itl.series(label).observe
        self.ttft = {hit: sink.ttft.series(label, hit).observe for hit in DEPTHS}
        self.prompt: tuple[Count, Count] | None = None
        """Tokens from the cache and others, once there are any."""


class PrometheusSink:
    """Counters and histograms of requests and attempts."""

    def __init__(
        self,
        registry: CollectorRegistry,
        known: Callable[[str], bool],
        here: Callable[[str], bool] = lambda worker: True,
    ) -> None:
        """``known`` tells whether a model may be a label, ``here`` whether a worker still is one:
        the series of one that left are forgotten."""
        self._known, self._here = known, here
        self._workers: set[str] = set()
        self._models: dict[str, _OfModel] = {}
        self._unfolded = 0

        def counter(name: str, text: str, *labels: str) -> Counts:
            return Counts(registry, f"headwater_{name}", text, *labels)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], *labels: str
        ) -> Distribution:
            made = Distribution(registry, f"headwater_{name}", text, buckets, *labels)
            self._histograms.append(made)
            return made

        self._histograms: list[Distribution] = []
        self._requests = counter("requests", "Answered requests.", "route", "model", "code")
        self._attempts = Counts(
            registry,
            "headwater_attempts",
            "Attempts on workers.",
            "worker",
            "outcome",
            lasts=lambda labels: labels[0] == OTHER or here(labels[0]),
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens, as engines say.", "model", "source")
        self._overlap = counter("overlap_tokens", "Known prompt tokens.", "model", "stage")
        self._loss = counter("loss_tokens", "Prompt tokens computed again.", "model", "reason")
        self._lookups = counter("lookups", "Requests by what was known.", "model", "result")
        self._retries = counter("retries", "Attempts after the first.", "reason")
        self._shed = counter("shed", "Requests that no worker could take.", "reason")
        self.ttft = histogram("ttft_seconds", "Arrival to first content.", _SECONDS, "model", "hit")
        self.itl = histogram("itl_seconds", "Mean time between contents.", _SECONDS, "model")
        self.total = histogram("request_seconds", "Arrival to end.", _SECONDS, "model")
        self._decision = histogram("decision_seconds", "Time to decide.", _SHORT, "stage")
        overhead = "Time in the gateway before the worker is called."
        self.overhead = histogram("overhead_seconds", overhead, _SHORT).series().observe
        """Takes seconds from arrival until the worker was called."""
        waited = "Time a request waited for a worker with room."
        self.waited = histogram("queue_seconds", waited, _SECONDS).series().observe
        """Takes seconds in the gateway's queue; 0 for those who did not wait."""
        error = "Predicted minus reported cached tokens."
        self._error = histogram("prediction_error_tokens", error, _TOKENS).series().observe

    def request(self, route: str, model: str, status: int) -> None:
        """One request was answered."""
        known = self._models.get(model) or self._of(model)
        self._requests.series[route, known.label, str(status)].value += 1
        self._unfolded += 1
        if self._unfolded >= FOLD_EVERY:
            self._unfolded = 0
            for histogram in self._histograms:
                histogram.fold()

    def record(self, record: RequestRecord) -> None:
        """See :class:`RecordSink`."""
        if record.attempt:
            worker = record.worker
            if worker not in self._workers:
                worker = self._worker(worker)
            self._attempts.series[worker, record.outcome].value += 1
        if not record.final or record.outcome is REJECTED:
            return
        model, flow = self._models.get(record.model) or self._of(record.model), record.flow
        model.total(record.total_s)
        self._lookups.series[model.label, lookup(flow)].value += 1
        if record.ttft_s is not None:
            model.ttft[hit_depth(flow)](record.ttft_s)
        if record.itl_s is not None:
            model.itl(record.itl_s)
        if flow.prompt:
            self._count_tokens(model, flow)
            if record.reported:
                self._error(abs(flow.captured - flow.delivered))

    def _count_tokens(self, known: _OfModel, flow: TokenFlow) -> None:
        model, prompt = known.label, known.prompt
        if prompt is None:
            series = self._prompt.series
            prompt = known.prompt = series[model, "cached"], series[model, "computed"]
        cached, computed = prompt
        cached.value += flow.delivered
        if flow.prompt > flow.delivered:
            computed.value += flow.prompt - flow.delivered
        if flow.prompt == flow.tail and not flow.delivered:
            return  # too short to be found again
        staged = _STAGED(flow)
        if any(staged):
            for stage, tokens in zip(STAGES, staged, strict=True):
                if tokens:
                    self._overlap.add((model, stage), tokens)
        lost = _LOST(flow)
        if any(lost):
            for reason, tokens in zip(LOSSES, lost, strict=True):
                if tokens:
                    self._loss.add((model, reason), tokens)

    def stage(self, name: str) -> Callable[[float], None]:
        """Takes the seconds that one stage of a decision took: parse, tokenize, hash, lookup, rank.

        Bound once, for it is called some times a request.
        """
        return self._decision.series(name).observe

    def retry(self, reason: str) -> None:
        """One more attempt is made."""
        self._retries.add((reason,))

    def shed(self, reason: str) -> None:
        """A request reached no worker."""
        self._shed.add((reason,))

    def _worker(self, worker: str) -> str:
        """Workers come and go under new names: those beyond a number share one series."""
        if len(self._workers) >= MAX_WORKERS:
            self._workers = {name for name in self._workers if self._here(name)}
            if len(self._workers) >= MAX_WORKERS:
                return OTHER
        self._workers.add(worker)
        return worker

    def _of(self, model: str) -> _OfModel:
        """A model that was served once keeps its series; the others share one."""
        label = model if model and self._known(model) else UNKNOWN
        known = self._models[label] = self._models.get(label) or _OfModel(self, label)
        return known


class FleetCollector(Collector):
    """Gauges read at scrape time, so that they can never be out of step."""

    def __init__(
        self,
        router: Router,
        stats: FeedStats,
        clock: Callable[[], float] = time.monotonic,
        outsiders: Callable[[], Sequence[WorkerStatus]] = tuple,
        lists: Callable[[], Sequence[SourceState]] = tuple,
        queued: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """``outsiders``: addresses that have never answered; they show as down. ``lists``: lists of
        workers that are followed. ``queued``: how many requests wait, by priority."""
        self._router, self._stats, self._clock = router, stats, clock
        self._outsiders, self._lists, self._queued = outsiders, lists, queued

    def collect(self) -> Iterable[Metric]:
        """All gauges. Called by the registry."""
        inflight = _gauge("inflight", "Attempts running on a worker.", "worker")
        state = _gauge("worker_state", "1 for the present state.", "worker", "state")
        trust = _gauge("worker_trust", "1 for how far the index is believed.", "worker", "state")
        parity = _gauge("worker_parity", "1 for how its tokens compare.", "worker", "state")
        blocks = _gauge("index_blocks", "Index entries of a worker.", "worker")
        host_blocks = _gauge("index_host_blocks", "Those in a worker's host memory.", "worker")
        known = self._router.workers(self._clock())
        names = {worker.id for worker in known}
        for worker in (*known, *(one for one in self._outsiders() if one.id not in names)):
            inflight.add_metric([worker.id], worker.inflight)
            blocks.add_metric([worker.id], worker.index_blocks)
            host_blocks.add_metric([worker.id], worker.index_host_blocks)
            for known_state in WorkerState:
                is_it = float(worker.state is known_state)
                state.add_metric([worker.id, known_state.value], is_it)
            for known_trust in Trust:
                is_it = float(worker.trust is known_trust)
                trust.add_metric([worker.id, known_trust.value], is_it)
            for verdict in Verdict:
                parity.add_metric([worker.id, verdict.value], float(worker.parity is verdict))
        queue = _gauge("queue_depth", "Requests waiting in the gateway.", "priority")
        depths = {0: 0}
        for priority, depth in self._queued().items():
            label = max(-MOST_URGENT, min(MOST_URGENT, priority))
            depths[label] = depths.get(label, 0) + depth
        for label, depth in sorted(depths.items()):
            queue.add_metric([str(label)], depth)
        lag = _gauge("index_lag_seconds", "Age of the newest cache event when it was taken in.")
        lag.add_metric([], self._stats.index_lag_s)
        up = _gauge("redis_up", "1 if the shared state is followed.")
        up.add_metric([], float(self._stats.redis_up))
        shared = _gauge("redis_configured", "1 if there is shared state to follow.")
        shared.add_metric([], float(self._stats.redis_configured))
        listed = _gauge("discovery_up", "1 if a list of workers can be read.", "source")
        for one in self._lists():
            listed.add_metric([one.source.value], float(not one.fault))
        return [inflight, state, trust, parity, blocks, host_blocks, queue, lag, up, shared, listed]


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"headwater_{name}", text, labels=labels)
