"""Sections of the HTML report that are charts: latency, workers and families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

from gateway.report.model import Branch, Report, Spread, TrustShare
from gateway.report.tables import (
    amount,
    counted,
    per_hundred,
    percent,
    ratio,
    seconds,
    told_apart,
)
from gateway.report.text import DEPTHS

MOST_WORKERS = 40
LONGEST_NAME = 26
_STATES = ("exact", "learned", "blind")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar."""

    name: str
    tokens: str
    percent: float
    shown: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table; ``left``: columns of text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: tuple[int, ...] = (0,)


def part(name: str, tokens: int, whole: int) -> Part:
    """``tokens`` of a bar that stands for ``whole``."""
    shown = per_hundred(tokens, whole)
    size = round(100 * tokens / whole, 3) if whole else 0.0
    return Part(name, f"{tokens:,}", size, shown if shown == "-" else f"{shown} %")


# ---------------------------------------------------------------- latency


def latency(report: Report) -> dict[str, Any]:
    """Ranges from the median to the 99th percentile, by hit depth."""
    charts = [
        {"title": title, "rows": found}
        for title, spreads in (
            ("Time to first token", report.ttft_s),
            ("Between two tokens", report.itl_s),
        )
        if (found := _ranges(spreads))
    ]
    head = ["hit", "requests", "mean", "p50", "p90", "p99", "gap mean", "gap p50", "gap p90",
            "gap p99"]  # fmt: skip
    rows = []
    for depth, label in DEPTHS.items():
        first, between = report.ttft_s[depth], report.itl_s[depth]
        if first.count:
            times = (first.mean, first.p50, first.p90, first.p99)
            gaps = (between.mean, between.p50, between.p90, between.p99)
            rows.append([label, f"{first.count:,}", *map(seconds, (*times, *gaps))])
    each = report.saved.ttft_reduction_percent["full_vs_none"]
    text = "" if each is None else f"Full hits wait {each:.0f} % less than misses on average."
    return {"ranges": charts, "latency": Table(head, rows), "saved_text": text}


def _ranges(spreads: dict[str, Spread]) -> list[dict[str, str]]:
    known = [
        (depth, label, spread.p50, spread.p99)
        for depth, label in DEPTHS.items()
        if (spread := spreads[depth]).p50 and spread.p99 and depth != "all"
    ]
    if not known:
        return []
    low = log10(min(p50 for _, _, p50, _ in known) * 0.8)
    span = max(log10(max(p99 for *_, p99 in known) * 1.02) - low, 0.01)
    rows = []
    for depth, label, p50, p99 in known:
        left, right = (100 * (log10(value) - low) / span for value in (p50, p99))
        rows.append(
            {
                "name": depth,
                "text": label.partition(" (")[0],
                "value": seconds(p50),
                "left": f"{left:.1f}",
                "width": f"{right - left:.1f}",
                "label": f"{label}: median {seconds(p50)}, 99th percentile {seconds(p99)}",
            }
        )
    return rows


# ---------------------------------------------------------------- workers


def workers(report: Report) -> dict[str, Any]:
    """Their shares, and how far each was believed over time."""
    found = report.balance.workers
    largest = max((worker.prompt for worker in found), default=0)
    names = told_apart([worker.worker for worker in found], LONGEST_NAME)
    rows = [
        {
            "name": name,
            "title": worker.worker,
            "parts": [
                part("delivered", worker.delivered, largest),
                part("cold", max(0, worker.computed), largest),
            ],
            "label": f"{worker.delivered:,} delivered, {worker.computed:,} computed",
            "cells": [
                f"{worker.requests:,}",
                f"{worker.failed:,}",
                amount(worker.prompt),
                percent(worker.delivered / worker.prompt if worker.prompt else None),
                amount(worker.stale_index),
                seconds(worker.ttft_p50_s),
                seconds(worker.ttft_p90_s),
            ],
        }
        for worker, name in zip(found[:MOST_WORKERS], names, strict=False)
    ]
    head = ["requests", "failed", "prompt", "hits", "stale", "ttft p50", "p90"]
    spread = report.balance.max_over_mean
    balance = ", ".join(f"{name} {ratio(value)}" for name, value in spread.items())
    hidden = len(found) - MOST_WORKERS
    trust = report.timeline.trust
    trusted = told_apart([each.worker for each in trust], LONGEST_NAME)
    return {
        "workers": {"head": head, "rows": rows},
        "balance": f"Busiest / mean, 1 is even: {balance}.",
        "more_workers": f"{hidden:,} more workers: --format json has them all."
        if hidden > 0
        else "",
        "strips": [_strip(each, trusted[at]) for at, each in enumerate(trust[:MOST_WORKERS])],
        "trust": Table(
            ["worker", *_STATES],
            [[one.worker, *(f"{sum(getattr(one, name)):,}" for name in _STATES)] for one in trust],
        ),
    }


def _strip(trust: TrustShare, name: str) -> dict[str, Any]:
    """The least trust of each step."""
    cells = [
        next((name for name in reversed(_STATES) if getattr(trust, name)[at]), "idle")
        for at in range(len(trust.exact))
    ]
    counts = ", ".join(f"{sum(getattr(trust, name)):,} {name}" for name in _STATES)
    return {
        "name": name,
        "title": trust.worker,
        "cells": cells,
        "label": f"{trust.worker}: requests {counts}",
    }


# ---------------------------------------------------------------- families


def families(report: Report) -> dict[str, Any]:
    """Trees of the largest, and all of them as a table."""
    head = ["family", "requests", "prompt", "delivered", "hits", "workers", "alike for"]
    rows, shown = [], []
    for family in report.families:
        alike = "-" if family.diverges_at is None else f"{family.diverges_at:,.0f} tokens"
        rows.append(
            [
                family.family,
                f"{family.requests:,}",
                amount(family.prompt),
                amount(family.delivered),
                percent(family.rate),
                f"{family.workers:,}",
                alike,
            ]
        )
        text = (
            f"{counted(family.requests, 'request')} on {counted(family.workers, 'worker')},"
            f" {percent(family.rate)} delivered"
        )
        if family.diverges_at is not None:
            text += f"; a request is like an earlier one for {alike} (median)"
        shown.append(
            {
                "name": family.family,
                "text": text,
                "tree": [branch_view(node, family.requests) for node in family.tree],
            }
        )
    return {"families": shown, "family_table": Table(head, rows)}


def branch_view(branch: Branch, whole: int) -> dict[str, Any]:
    """One branch in words and as a bar."""
    text = branch_text(branch)
    size = 100 * branch.requests / whole if whole else 0.0
    filled = size * min(1.0, branch.rate or 0.0)
    return {
        "text": text,
        "label": text,
        "parts": [
            Part("delivered", amount(branch.delivered), round(filled, 3), percent(branch.rate)),
            Part("cold", amount(branch.prompt - branch.delivered), round(size - filled, 3), ""),
        ],
        "branches": [branch_view(child, whole) for child in branch.branches],
    }


def branch_text(branch: Branch) -> str:
    """``alike for 512 tokens: 1,200 requests, 83.0 % delivered; then 14 ways, most part ...``"""
    text = (
        f"alike for {branch.tokens:,} tokens: {counted(branch.requests, 'request')},"
        f" {percent(branch.rate)} delivered"
    )
    if branch.ways > 1:
        alone = branch.ways >= 0.9 * branch.requests
        text += "; then each its own way" if alone else f"; then {branch.ways:,} ways"
        if branch.diverges_at is not None:
            text += f", parting at about {branch.diverges_at:,.0f}"
    elif branch.ways == 0:
        text += "; ends there"
    return text
