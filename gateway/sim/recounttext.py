"""A replay's result as a page of text, and as JSON."""

from __future__ import annotations

import msgspec

from gateway.report.tables import Page, counted, percent, ratio, seconds
from gateway.sim.recount import ReplayResult


def to_json(result: ReplayResult) -> str:
    """One JSON object and a newline."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def to_text(result: ReplayResult, *, colour: bool) -> str:
    """Both answers, in at most 100 columns."""
    page = Page(colour=colour)
    measured, model = result.measured, result.model
    by = f" by {', '.join(measured.policies)}" if measured.policies else ""
    page.line(
        f"{result.source}: {counted(measured.requests, 'request')}{by} on "
        f"{counted(result.workers, 'worker')}, hits {percent(measured.hit_rate)}",
        "bold",
    )
    if result.decided:
        page.heading("Decided again: each decision by itself, in the caches there were")
        page.table(("policy", "same choice", "TTFT", "recorded", "matched", "recorded"), [
            (
                row.policy,
                percent(row.same / row.decisions),
                seconds(row.ttft_s),
                seconds(row.recorded_ttft_s),
                f"{row.matched_tokens:,}",
                f"{row.recorded_matched_tokens:,}",
            )
            for row in result.decided
        ])  # fmt: skip
        page.line("TTFT: predicted for the chosen workers, mean; matched: tokens in their caches.")
    else:
        page.line("Decisions cannot be taken again: [ledger] decisions was off.")
    page.heading("Served again: the whole traffic, simulated from empty caches")
    page.line(
        f"Workers as fitted: {model.kv_blocks:,} blocks of {result.block_size} tokens "
        f"({result.memory_from}), "
        f"{model.prefill_tokens_per_s:,.0f} prompt tokens/s, {seconds(model.overhead_s)} per "
        f"prefill, {seconds(model.token_s)} per token"
    )
    columns = ("policy", "hits", "mean", "p50", "p90", "p99", "prefill", "saved", "busiest")
    page.table(columns, [*_measured(result), *_served(result)])
    page.line(
        "mean to p99: time to first token; prefill: of all workers; saved: against the recorded "
        "placement, both simulated. How far 'recorded' is from 'measured' is how far to believe "
        "the rest."
    )
    return page.text()


def _measured(result: ReplayResult) -> list[tuple[str, ...]]:
    times = result.measured.ttft
    if times is None:
        return []
    shown = (times.mean_s, times.p50_s, times.p90_s, times.p99_s)
    hits = percent(result.measured.hit_rate)
    return [("measured", hits, *map(seconds, shown), "", "", "")]


def _served(result: ReplayResult) -> list[tuple[str, ...]]:
    return [
        (
            row.policy,
            percent(row.hit_rate),
            *map(seconds, (row.ttft.mean_s, row.ttft.p50_s, row.ttft.p90_s, row.ttft.p99_s)),
            f"{row.prefill_s:,.1f} s",
            _signed(row.saved_s),
            ratio(row.busiest),
        )
        for row in result.served
    ]


def _signed(value: float) -> str:
    """Seconds with a sign; what rounds to nothing has none."""
    shown = f"{value:+,.1f} s"
    return shown if float(shown[:-2].replace(",", "")) else "0.0 s"
