"""Results as a page of text, and beside those of another file."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gateway.loadtest.result import BenchResult, Run
from gateway.loadtest.stats import Estimate
from gateway.report.tables import Page, percent, ratio, seconds

_COLUMNS = ("policy", "hits", "TTFT mean", "p50", "p99", "ITL p50", "req/s", "tok/s", "busiest")


def to_text(result: BenchResult, *, before: BenchResult | None = None, colour: bool) -> str:
    """The runs, one line each; several rounds of a policy as their median too."""
    page = Page(colour=colour)
    pace = f"{result.concurrency} sessions at a time"
    if result.concurrency is None:
        pace = "the trace's own times" if result.rate is None else f"{result.rate:g} sessions/s"
    page.line(f"{result.workload} on {result.url} ({result.model}), {pace}", "bold")
    page.line()
    page.table(_COLUMNS, [_row(run) for run in result.runs])
    for line in (*_notes(result.runs), *_medians(result.runs)):
        page.line()
        page.line(line)
    if before is not None:
        page.heading("Against the other file (1.00 = equal; below 1 is quicker)")
        page.table(("policy", "TTFT mean", "p50", "p99", "req/s", "hits"), _against(before, result))
    return page.text()


def _row(run: Run) -> tuple[str, ...]:
    ttft, itl = run.ttft, run.itl
    return (
        run.policy or "(as it is)",
        "-" if run.hit_rate is None else percent(run.hit_rate),
        "-" if ttft is None else _within(ttft.mean),
        "-" if ttft is None else seconds(ttft.p50.value),
        "-" if ttft is None else seconds(ttft.p99.value),
        "-" if itl is None else seconds(itl.p50.value),
        f"{run.requests_per_s:.1f}",
        f"{run.output_tokens_per_s:.0f}",
        "-" if run.busiest is None else ratio(run.busiest),
    )


def _within(estimate: Estimate) -> str:
    """With half the width of its interval, in per cent."""
    half = (estimate.high - estimate.low) / 2
    return f"{seconds(estimate.value)} ±{percent(half / estimate.value if estimate.value else 0)}"


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    for run in runs:
        name = run.policy or "the run"
        if run.errors:
            notes.append(f"{name}: {run.errors} of {run.requests} failed, first: {run.first_error}")
        if run.client.limiting:
            notes.append(
                f"{name}: the load generator was the bottleneck ({percent(run.client.busy)} of a "
                f"core, timers {seconds(run.client.lag_p99_s)} late at p99): its figures are not "
                "the cluster's. Ask for less, or from another machine."
            )
        if run.hit_rate is None and run.requests > run.errors:
            notes.append(f"{name}: no worker reports cached_tokens, so there is no hit rate.")
    return notes


def _medians(runs: Sequence[Run]) -> list[str]:
    """Of policies with several rounds."""
    by_policy: dict[str, list[Run]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, []).append(run)
    lines = []
    for policy, rounds in by_policy.items():
        means = [run.ttft.mean.value for run in rounds if run.ttft is not None]
        hits = [run.hit_rate for run in rounds if run.hit_rate is not None]
        if len(rounds) > 1 and means:
            shown = f", hits {percent(median(hits))}" if hits else ""
            name = policy or "(as it is)"
            lines.append(
                f"{name}: median of {len(means)} rounds: TTFT {seconds(median(means))}{shown}"
            )
    return lines


def _against(before: BenchResult, after: BenchResult) -> list[tuple[str, ...]]:
    rows = []
    for policy in dict.fromkeys(run.policy for run in after.runs):
        old = [run for run in before.runs if run.policy == policy]
        new = [run for run in after.runs if run.policy == policy]
        if old:
            rows.append((policy or "(as it is)", *_ratios(old, new)))
    return rows


def _ratios(old: Sequence[Run], new: Sequence[Run]) -> list[str]:
    def times(name: str, runs: Sequence[Run]) -> float | None:
        found = [getattr(run.ttft, name).value for run in runs if run.ttft is not None]
        return median(found) if found else None

    def quotient(one: float | None, two: float | None) -> str:
        return "-" if not one or two is None else f"{two / one:.2f}"

    shown = [quotient(times(name, old), times(name, new)) for name in ("mean", "p50", "p99")]
    rate = [median(run.requests_per_s for run in runs) for runs in (old, new)]
    hits = [[run.hit_rate for run in runs if run.hit_rate is not None] for runs in (old, new)]
    both = [median(found) if found else None for found in hits]
    return [*shown, quotient(*rate), quotient(*both)]
