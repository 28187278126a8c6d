"""The gateway's metric families without a gateway, for ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from gateway.config import RoutingConfig
from gateway.discovery.base import Source
from gateway.feedmetrics import BAD, ENGINE_COUNTS, FeedCollector
from gateway.index.stats import FeedStats
from gateway.index.table import PrefixTable
from gateway.parity import Verdict
from gateway.plugins import all_policies
from gateway.processes.front import process_families
from gateway.records import Outcome
from gateway.router import Router
from gateway.routing.base import Trust, WorkerState
from gateway.telemetry import LOSSES, STAGES, FleetCollector, PrometheusSink


def families() -> tuple[Iterable[Metric], dict[str, str]]:
    """All families, and the values of labels from fixed sets."""
    registry = CollectorRegistry()
    rng, config, stats = Random(0), RoutingConfig(), FeedStats()
    table = PrefixTable(config.index_max_blocks, rng)
    router = Router(table, all_policies(config), config, rng, lambda: 0.0)
    registry.register(FeedCollector(stats))
    registry.register(FleetCollector(router, stats, lambda: 0.0))
    PrometheusSink(registry, lambda _: False)
    return [*registry.collect(), *process_families(0, 0)], _values()


def _values() -> dict[str, str]:
    def told(names: Iterable[str]) -> str:
        return ", ".join(names)

    return {
        "attempts_total.outcome": told(Outcome),
        "decision_seconds.stage": "parse, tokenize, hash, lookup, rank",
        "discovery_up.source": told(Source),
        "engine_stream_total.what": told((*ENGINE_COUNTS, *BAD)),
        "lookups_total.result": "too_short, nothing_known, not_chosen, chosen",
        "loss_tokens_total.reason": told(LOSSES),
        "overlap_tokens_total.stage": told(STAGES),
        "prompt_tokens_total.source": "cached, computed",
        "queue_depth.priority": "-5 to 5",
        "ttft_seconds.hit": "none, partial, full (every block that can match)",
        "worker_parity.state": told(Verdict),
        "worker_state.state": told(WorkerState),
        "worker_trust.state": told(Trust),
    }
