"""The report as one HTML page that needs neither a network nor a script.

Bars are elements with a width in per cent and lines are SVG, so that nothing scales its text; each
colour has a pattern, and each chart a table behind it. The values are put together here and in
:mod:`gateway.report.htmlparts` and :mod:`gateway.report.htmltime`, the markup is in ``templates/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gateway.reasons import CODES
from gateway.report.htmlparts import Part, Table, families, latency, part, workers
from gateway.report.htmltime import over_time
from gateway.report.model import Report
from gateway.report.tables import (
    amount,
    counted,
    moment,
    per_hundred,
    percent,
    ratio,
    round_number,
    seconds,
)
from gateway.report.text import LOOKUPS, LOSSES, RATES, largest_loss, notes_of

MOST_GROUPS = 100
_STEPS = (
    ("prompt", "prompt tokens in all", ("available", "cold", "evicted", "tail")),
    (
        "available",
        "some worker held",
        ("captured", "diverted_for_load", "draining", "policy", "isolation"),
    ),
    ("captured", "the chosen worker held", ("kept", "stale_index", "token_mismatch", "unreported")),
    ("delivered", "the engine delivered", ("kept", "gained")),
)
"""Steps of the funnel: what stays comes first. ``kept`` is what was captured and delivered."""


def to_html(report: Report) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
    )
    values: dict[str, Any] = {
        **_head(report),
        **_funnel(report.totals),
        **over_time(report),
        **latency(report),
        **_saved(report),
        **workers(report),
        **families(report),
        **_prediction(report),
        **_groups(report),
        "counts_tables": _counts(report),
    }
    return environment.get_template("report.html.j2").render(values)


def _head(report: Report) -> dict[str, Any]:
    totals = report.totals
    files = report.files[0] if len(report.files) == 1 else f"{len(report.files)} files"
    return {
        "when": f"{moment(report.first_at)} to {moment(report.last_at)}",
        "what": f"{counted(totals['requests'], 'request')} with "
        f"{counted(totals['prompt'], 'prompt token')}",
        "notes": notes_of(report),
        "tiles": _tiles(report),
        "files": files,
        "percentiles": report.percentiles,
    }


def _tiles(report: Report) -> list[dict[str, str]]:
    prompt, saved, other = report.totals["prompt"], report.saved, report.counterfactual
    tiles = [
        (share(report.totals["delivered"], prompt), "of the prompt tokens came from a cache"),
        (
            share(report.totals["delivered"], report.totals["available"]),
            "of what some worker held was delivered",
        ),
    ]
    if saved.prefill_s is not None:
        text = "of prefill not computed again (estimated)"
        tiles.append((seconds(saved.prefill_s), text))
    lower = saved.ttft_reduction_percent["hit_vs_none"]
    if lower is not None:
        word = "lower" if lower >= 0 else "higher"
        text = f"{word} mean time to first token with a hit than without (measured)"
        tiles.append((f"{abs(lower):.0f} %", text))
    each = saved.ttft_reduction_percent["per_request"]
    if each is not None:
        tiles.append((f"{each:.0f} %", "of its own waiting a hit saved, on average (estimated)"))
    if other.requests and other.other_matched:
        times = other.matched / other.other_matched
        tiles.append((f"{times:.1f}x", "as many tokens found as by taking turns (round-robin)"))
    return [{"value": value, "text": text} for value, text in tiles]


def share(part_: int, whole: int) -> str:
    """A share in per cent, never rounded to nothing or to all."""
    shown = per_hundred(part_, whole)
    return shown if shown == "-" else f"{shown} %"


def _funnel(totals: Mapping[str, int]) -> dict[str, Any]:
    prompt = totals["prompt"]
    known = {**totals, "kept": totals["delivered"] - totals["gained"]}
    funnel = []
    for name, text, parts in _STEPS:
        shown = [_named(each, known[each], prompt) for each in parts]
        label = ", ".join(f"{each.name} {each.shown}" for each in shown if each.percent)
        value = f"{prompt:,}" if name == "prompt" else share(totals[name], prompt)
        funnel.append({"share": value, "text": text, "parts": shown, "label": label})
    losses = [
        {"name": name, "share": share(totals[name], prompt), "text": text}
        for name, text in {**LOSSES, "gained": "delivered although not expected"}.items()
        if totals[name]
    ]
    spared = ", ".join(name for name in LOSSES if not totals[name])
    table = Table(
        ["name", "tokens", "of the prompt"],
        [
            [name, f"{tokens:,}", share(tokens, prompt)]
            for name, tokens in totals.items()
            if name != "requests"
        ],
    )
    return {"funnel": funnel, "losses": losses, "spared": spared, "totals": table}


def _named(name: str, tokens: int, whole: int) -> Part:
    return part("delivered" if name == "kept" else name, tokens, whole)


def _saved(report: Report) -> dict[str, Any]:
    saved, other = report.saved, report.counterfactual
    lines = [f"{saved.tokens:,} prompt tokens were not computed again."]
    if saved.prefill_s is not None:
        lines.append(f"That is about {seconds(saved.prefill_s)} of prefill on the workers.")
    elif saved.tokens:
        lines.append("No time can be estimated: no request that reused nothing was timed.")
    rates = Table(
        ["model", "method", "cold requests", "ms per token", "tokens", "prefill"],
        [
            [
                rate.model,
                rate.method,
                f"{rate.cold_requests:,}",
                "-" if rate.s_per_token is None else f"{1000 * rate.s_per_token:.3g}",
                f"{rate.tokens:,}",
                seconds(rate.prefill_s),
            ]
            for rate in saved.models
        ],
        left=(0, 1),
    )
    versus = []
    if other.requests:
        largest = max(other.matched, other.other_matched, 1)
        for text, ttft, tokens, name in (
            ("found as routed", other.ttft_mean_s, other.matched, "delivered"),
            ("by taking turns", other.other_ttft_mean_s, other.other_matched, "cold"),
        ):
            versus.append(
                {
                    "value": f"{round_number(tokens)} tokens",
                    "text": f"{text}; {seconds(ttft)} to first token expected",
                    "parts": [part(name, tokens, largest)],
                }
            )
    text = f"Of {counted(other.requests, 'request')}."
    if other.saved_prefill_s is not None:
        text += f" The difference is about {seconds(other.saved_prefill_s)} of prefill."
    how = [f"Prefill: {saved.how}", f"Round-robin: {other.how}"]
    return {
        "saved_lines": lines,
        "how": how,
        "rates": rates,
        "versus": versus,
        "versus_text": text,
    }


def _prediction(report: Report) -> dict[str, Any]:
    told = report.prediction
    lines = []
    if told.requests:
        lines.append(
            f"Overlap: {share(told.exact, told.requests)} of {counted(told.requests, 'request')}"
            f" exactly as predicted, {told.promised_too_much:,} promised too much,"
            f" {told.promised_too_little:,} too little; wrong for {told.error_percent or 0:.2f} %"
            " of the prompt tokens."
        )
    if told.ttft_requests:
        lines.append(
            f"Time to first token: median ratio {ratio(told.ttft_median_ratio)}, mean error"
            f" {seconds(told.ttft_mean_abs_error_s)}."
        )
    largest = max((bin_.requests for bin_ in told.ttft_ratios), default=0)
    histogram, rows = [], []
    for bin_ in told.ttft_ratios if largest else ():
        low, high = bin_.low, bin_.high
        text = (
            f"< {high:g}" if low is None else f">= {low:g}" if high is None else f"{low:g}-{high:g}"
        )
        good = low is not None and high is not None and low <= 1 < high
        shown = share(bin_.requests, told.ttft_requests)
        size = 82 * bin_.requests / largest
        histogram.append({"value": shown, "percent": f"{size:.1f}", "text": text, "good": good})
        rows.append([text, f"{bin_.requests:,}", shown])
    return {
        "prediction": " ".join(lines) or "Nothing was predicted and measured.",
        "histogram": histogram,
        "ratios": Table(["predicted / actual", "requests", "share"], rows),
    }


def _groups(report: Report) -> dict[str, Any]:
    head = [*report.by, "requests", "prompt", "available", "captured", "delivered", "lost most to",
            "ttft p50", "ttft p99"]  # fmt: skip
    rows = []
    for group in report.groups[:MOST_GROUPS]:
        prompt = group.totals["prompt"]
        rows.append(
            [
                *(group.key[name] or "(none)" for name in report.by),
                f"{group.totals['requests']:,}",
                amount(prompt),
                *(share(group.totals[name], prompt) for name in RATES),
                largest_loss(group),
                seconds(group.ttft_s["all"].p50),
                seconds(group.ttft_s["all"].p99),
            ]
        )
    hidden = len(report.groups) - MOST_GROUPS
    return {
        "by": ", ".join(report.by),
        "groups": Table(head, rows, left=tuple(range(len(report.by)))),
        "more_groups": f"{hidden:,} more: --format csv has them all." if hidden > 0 else "",
    }


def _counts(report: Report) -> list[Table]:
    attempts = report.attempts
    reasons = {CODES.get(code, "not recorded"): count for code, count in report.reasons.items()}
    tables = [
        ("why this worker", reasons),
        ("look-up", {LOOKUPS[name]: report.lookups[name] for name in LOOKUPS}),
        ("outcome", report.outcomes),
        ("attempts", attempts.by_attempts),
        ("retried after", attempts.retry_reasons),
    ]
    return [
        Table(
            [title, "requests", "share"],
            [
                [name, f"{count:,}", percent(count / max(1, sum(counts.values())))]
                for name, count in counts.items()
                if count
            ],
        )
        for title, counts in tables
        if any(counts.values())
    ]
