"""The result as a page of text, and as JSON."""

from __future__ import annotations

import msgspec

from gateway.report.tables import Page, counted, percent, ratio, seconds
from gateway.sim.result import Bounds, Simulation, Ttft

UNSTABLE = 0.95


def to_json(simulation: Simulation) -> str:
    """One JSON object and a newline."""
    return msgspec.json.format(msgspec.json.encode(simulation), indent=2).decode() + "\n"


def to_text(simulation: Simulation, *, colour: bool = False) -> str:
    """The table of policies and bounds, in at most 100 columns."""
    page = Page(colour=colour)
    worker, bounds = simulation.worker, simulation.bounds
    sessions = ""
    if simulation.sessions is not None:
        sessions = f" in {counted(simulation.sessions, 'session')}"
    page.line(
        f"{simulation.trace}: {counted(simulation.requests, 'request')}{sessions}, "
        f"{counted(simulation.input_tokens, 'prompt token')}",
        "bold",
    )
    pace = "at the trace's own pace"
    if simulation.load is not None:
        pace = f"load {simulation.load:g} (the trace's times x {simulation.time_scale:.3g})"
    page.line(
        f"{counted(simulation.workers, 'worker')} of {worker.kv_blocks:,} blocks of "
        f"{simulation.block_size} tokens, {pace}, seed {simulation.seed}"
    )
    page.line()
    columns = ("policy", "hits", "of pool", "mean", "p50", "p90", "p99", "of pool", "busiest")
    page.table(columns, [*_policies(simulation), *_bounds(bounds)])
    page.line()
    page.line(
        "hits: prompt tokens not computed again; mean to p99: time to first token; busiest: a "
        "worker's prefill work over the mean. Bounds: one LRU cache with the memory of all "
        "workers, and one that forgets nothing, each behind one queue for all workers."
    )
    if bounds.utilisation >= UNSTABLE:
        page.line(
            f"One pooled queue is busy to {percent(bounds.utilisation)} by itself: no policy keeps "
            "up, and times depend on the length of the trace.",
            "bold",
        )
    return page.text()


def _policies(simulation: Simulation) -> list[tuple[str, ...]]:
    bounds = simulation.bounds
    return [
        (
            result.policy,
            percent(result.hit_rate),
            _share(result.hit_rate, bounds.pooled_hit_rate),
            *_times(result.ttft),
            _multiple(result.ttft.mean_s / bounds.ttft_pooled.mean_s),
            ratio(result.busiest_work),
        )
        for result in simulation.policies
    ]


def _bounds(bounds: Bounds) -> list[tuple[str, ...]]:
    infinite, pooled = bounds.infinite_hit_rate, bounds.pooled_hit_rate
    of_pooled = _multiple(bounds.ttft_infinite.mean_s / bounds.ttft_pooled.mean_s)
    return [
        ("bound: pool", percent(pooled), "", *_times(bounds.ttft_pooled), "", ""),
        (
            "bound: infinite",
            percent(infinite),
            _share(infinite, pooled),
            *_times(bounds.ttft_infinite),
            of_pooled,
            "",
        ),
    ]


def _times(ttft: Ttft) -> tuple[str, ...]:
    return tuple(map(seconds, (ttft.mean_s, ttft.p50_s, ttft.p90_s, ttft.p99_s)))


def _multiple(value: float) -> str:
    return f"{value:.2f}x" if value < 100 else f"{value:,.0f}x"


def _share(value: float, whole: float) -> str:
    return percent(value / whole) if whole else "-"
