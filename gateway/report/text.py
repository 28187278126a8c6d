"""The report for people: a story of some 15 lines first, then tables."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.packed import BREAKS_OFF
from gateway.report.model import Report, Section
from gateway.report.tables import (
    WIDTH,
    Page,
    amount,
    counted,
    moment,
    per_hundred,
    percent,
    ratio,
    seconds,
)

LOSSES = {
    "tail": "can never match: the last, partial block and the last token",
    "cold": "never seen before",
    "evicted": "seen before, but no worker holds them any more",
    "diverted_for_load": "another worker was expected to answer sooner than the one that held them",
    "draining": "held only by a worker that is being shut down",
    "policy": "the routing policy preferred another worker",
    "isolation": "held for another tenant, which must not be shared",
    "stale_index": "the chosen worker had dropped them before the request came",
    "token_mismatch": "gateway and engine made different tokens of the same text",
    "unreported": "the engine did not tell what it reused",
}
"""Every way to lose a token, in the order a request meets them."""

LOOKUPS = {
    "chosen": "chosen",
    "known_not_chosen": "known but not chosen",
    "nothing_known": "nothing known",
    "too_short": "prompt too short",
}
DEPTHS = {
    "full": "full (all that can match)",
    "partial": "partial",
    "none": "none",
    "unknown": "not told by the engine",
    "all": "all",
}
RATES = ("available", "captured", "delivered")
MOST_GROUPS = 25
MOST_WORKERS = 40


def to_text(report: Report, *, width: int = WIDTH, colour: bool = False) -> str:
    """The report in at most ``width`` columns; ``colour`` is for terminals."""
    page = Page(width=min(width, WIDTH), colour=colour)
    _story(page, report)
    _latency(page, report)
    _saved(page, report)
    _requests(page, report)
    _workers(page, report)
    _families(page, report)
    _groups(page, report)
    _warnings(page, report)
    return page.text()


def _story(page: Page, report: Report) -> None:
    totals = report.totals
    prompt = totals["prompt"]
    page.line(
        f"{counted(totals['requests'], 'request')} with {counted(prompt, 'prompt token')},"
        f" {moment(report.first_at)} to {moment(report.last_at)} UTC",
        "bold",
    )
    if not prompt:
        page.line("No prompt tokens were counted: nothing can be said about reuse.")
        return
    page.heading("Of every 100 prompt tokens")
    for name, text in (
        ("available", "could be reused: some worker held them when the request came"),
        ("captured", "were routed to: the chosen worker held them"),
        ("delivered", "were delivered: the engine says it did not compute them again"),
    ):
        page.line(f"{per_hundred(totals[name], prompt):>6}  {text}")
    page.heading("Where the others went")
    for name, phrase in LOSSES.items():
        if totals[name]:
            page.line(f"{per_hundred(totals[name], prompt):>6}  {name:<18} {phrase}")
    if totals["gained"]:
        more = per_hundred(totals["gained"], prompt)
        page.line(f"{'+' + more:>6}  {'gained':<18} delivered although not expected")
    spared = [name for name in LOSSES if not totals[name]]
    if spared:
        page.line(f"        nothing lost to: {', '.join(spared)}")


def _latency(page: Page, report: Report) -> None:
    if not report.ttft_s["all"].count:
        return
    page.heading("Time to first token, and between tokens, by how much of the prompt was a hit")
    rows = []
    for depth, label in DEPTHS.items():
        first, between = report.ttft_s[depth], report.itl_s[depth]
        if first.count:
            times = (first.mean, first.p50, first.p90, first.p99)
            gaps = (between.p50, between.p90, between.p99)
            rows.append((label, f"{first.count:,}", *map(seconds, times), *map(seconds, gaps)))
    page.table(
        ("hit", "requests", "mean", "p50", "p90", "p99", "gap p50", "p90", "p99"),
        rows,
    )
    if report.percentiles != "exact":
        page.line("Percentiles are approximate: there are very many records.")


def _saved(page: Page, report: Report) -> None:
    saved = report.saved
    page.heading("Saved")
    line = f"Prompt tokens not computed again: {saved.tokens:,}"
    if saved.prefill_s is not None:
        line += f", about {seconds(saved.prefill_s)} of prefill"
    page.line(line + ".")
    parts = [
        f"{abs(value):.0f} % {'lower' if value >= 0 else 'higher'} {text}"
        for name, text in (("hit_vs_none", "with a hit"), ("full_vs_none", "with a full hit"))
        if (value := saved.ttft_reduction_percent[name]) is not None
    ]
    if parts:
        page.line(f"Mean time to first token: {', '.join(parts)} than without one (measured).")
    each = saved.ttft_reduction_percent["per_request"]
    if each is not None:
        page.line(f"A hit saved its own request {each:.0f} % of that time on average (estimated).")
    if saved.prefill_s is not None:
        page.line(f"Estimated from {saved.how}.")
    elif saved.tokens:
        page.line("No time can be estimated: no streamed request that reused nothing was recorded.")
    other = report.counterfactual
    if other.requests and other.matched + other.other_matched:
        page.line(
            f"Taking turns (round-robin) would have found {other.other_matched:,} tokens instead of"
            f" {other.matched:,}; first token expected after {seconds(other.other_ttft_mean_s)}"
            f" instead of {seconds(other.ttft_mean_s)} (mean; caches as they were)."
        )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _requests(page: Page, report: Report) -> None:
    page.heading("Requests")
    lookups = {LOOKUPS[name]: report.lookups[name] for name in LOOKUPS if report.lookups[name]}
    page.line(f"Look-ups: {_listed(lookups)}.")
    page.line(f"Outcomes: {_listed(report.outcomes)}.")
    reasons = {name or "not recorded": count for name, count in report.reasons.items()}
    if set(reasons) != {"not recorded"}:
        page.line(f"Why that worker: {_listed(reasons)} (docs/ledger.md lists the codes).")
    attempts = report.attempts
    retried = (
        f"Attempts: {attempts.attempts:,}; {counted(attempts.retried_requests, 'request')} retried"
    )
    if attempts.retry_reasons:
        retried += f" after {_listed(attempts.retry_reasons)}"
    page.line(retried + ".")
    prediction = report.prediction
    if prediction.requests:
        page.line(
            f"Prediction: {per_hundred(prediction.exact, prediction.requests)} % exact,"
            f" {prediction.promised_too_much:,} promised too much,"
            f" {prediction.promised_too_little:,} too little;"
            f" wrong for {prediction.error_percent or 0:.2f} % of the prompt tokens."
        )
    if prediction.ttft_requests:
        page.line(
            "Predicted time to first token / actual, median:"
            f" {ratio(prediction.ttft_median_ratio)};"
            f" mean error {seconds(prediction.ttft_mean_abs_error_s)}."
        )


def _workers(page: Page, report: Report) -> None:
    workers = report.balance.workers
    if not workers:
        return
    spread = report.balance.max_over_mean
    page.heading(
        "Workers (busiest / mean: "
        + ", ".join(f"{name} {ratio(value)}" for name, value in spread.items())
        + ")"
    )
    rows = [
        (
            worker.worker,
            f"{worker.requests:,}",
            f"{worker.failed:,}",
            amount(worker.prompt),
            amount(worker.computed),
            percent(worker.delivered / worker.prompt if worker.prompt else None),
            seconds(worker.ttft_p50_s),
            ", ".join(worker.trust) or "-",
        )
        for worker in workers[:MOST_WORKERS]
    ]
    page.table(
        ("worker", "requests", "failed", "prompt", "computed", "hits", "ttft p50", "trust"), rows
    )
    _more(page, len(workers) - MOST_WORKERS, "workers")


def _families(page: Page, report: Report) -> None:
    if not report.families:
        return
    page.heading("Largest prefix families (prompts that begin alike)")
    page.table(
        ("family", "requests", "prompt", "delivered", "hits", "workers", "alike for"),
        [
            (
                family.family,
                f"{family.requests:,}",
                amount(family.prompt),
                amount(family.delivered),
                percent(family.rate),
                f"{family.workers:,}",
                "-" if family.diverges_at is None else f"{family.diverges_at:,.0f}",
            )
            for family in report.families
        ],
    )


def largest_loss(section: Section) -> str:
    """The term that took most of the tokens that could have been delivered, by name."""
    name = max((name for name in LOSSES if name != "tail"), key=lambda name: section.totals[name])
    tokens = section.totals[name]
    return f"{name} {per_hundred(tokens, section.totals['prompt'])}" if tokens else "-"


def _groups(page: Page, report: Report) -> None:
    if not report.by:
        return
    page.heading(f"By {', '.join(report.by)} (of every 100 prompt tokens)")
    wide = len(report.by) <= 2
    columns = ("avail", "routed", "deliv", "lost most to") if wide else ("deliv",)
    rows = []
    for group in report.groups[:MOST_GROUPS]:
        prompt = group.totals["prompt"]
        names = [group.key[name] or "(none)" for name in report.by]
        counts = (f"{group.totals['requests']:,}", amount(prompt))
        hits = [per_hundred(group.totals[name], prompt) for name in RATES]
        middle = (*hits, largest_loss(group)) if wide else hits[-1:]
        rows.append((*names, *counts, *middle, seconds(group.ttft_s["all"].p50)))
    page.table((*report.by, "requests", "prompt", *columns, "ttft p50"), rows, names=len(report.by))
    _more(page, len(report.groups) - MOST_GROUPS, "groups")


def _more(page: Page, hidden: int, what: str) -> None:
    if hidden > 0:
        page.line(f"... and {hidden:,} more {what}: --format json has them all.")


def notes_of(report: Report) -> list[str]:
    """What a reader should know of the records themselves."""
    notes: list[str] = []
    if report.skipped_lines:
        where = f"{report.skipped[0].file}:{report.skipped[0].line}" if report.skipped else "?"
        notes.append(
            f"{counted(report.skipped_lines, 'unreadable line')} left out, first {where}"
            " (cut off by a crash, or being written now)."
        )
    notes += [
        f"{line.file} breaks off at line {line.line}: what else was in it is lost."
        for line in report.skipped
        if line.reason.startswith(BREAKS_OFF)
    ]
    if report.dropped_records:
        notes.append(
            f"{counted(report.dropped_records, 'record')} missing: a gateway could not write them."
        )
    if report.untold_requests:
        untold = counted(report.untold_requests, "answered request")
        notes.append(
            f"For {untold} the engine did not tell what it"
            " reused: vLLM needs --enable-prompt-tokens-details, SGLang --enable-cache-report."
        )
    return notes


def _warnings(page: Page, report: Report) -> None:
    notes = notes_of(report)
    if notes:
        page.heading("Note")
        for note in notes:
            page.line(note)
