"""The HTML report's section about time: stacked columns of tokens, and lines of medians."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.report.htmlparts import Table, part
from gateway.report.model import Moment, Number, Report, Timeline
from gateway.report.tables import amount, seconds

LEAST_REQUESTS = 3
"""The median of fewer is no point of a line; the table has it."""
STACK = ("delivered", "stale_index", "token_mismatch", "unreported", "diverted_for_load",
         "draining", "policy", "isolation", "evicted", "cold", "tail")  # fmt: skip
"""What becomes of a prompt's tokens, from the bottom; with ``gained`` taken from what it was."""


def over_time(report: Report) -> dict[str, Any]:
    """Stacked columns of tokens, and two lines of medians."""
    timeline = report.timeline
    moments = timeline.moments
    largest = max((moment.totals["prompt"] for moment in moments), default=0)
    if len(moments) < 2 or not largest:
        nothing: list[str] = []
        return {"columns": nothing, "axis": nothing, "lines": nothing}
    stacks = [dict(_stack(moment)) for moment in moments]
    present = [name for name in STACK if any(stack[name] for stack in stacks)]
    columns = [
        {
            "title": f"{_clock(moment.at, timeline)}: {moment.totals['prompt']:,} tokens",
            "parts": [part(name, stack[name], largest) for name in present],
        }
        for moment, stack in zip(moments, stacks, strict=True)
    ]
    lines, line_max = _lines(moments)
    return {
        "columns": columns,
        "column_max": amount(largest),
        "column_names": [(name, name) for name in present],
        "step": seconds(timeline.step_s) if timeline.step_s < 100 else _length(timeline.step_s),
        "axis": [_clock(moments[at].at, timeline) for at in _thirds(len(moments))],
        "lines": lines,
        "line_max": line_max,
        "steps": _steps(moments, timeline, present, stacks),
    }


def _stack(moment: Moment) -> list[tuple[str, int]]:
    """Parts that add up to the prompt: what was gained had been lost or cold before."""
    totals = moment.totals
    parts = {name: totals[name] for name in STACK}
    over = totals["gained"]
    for name in ("cold", "evicted", "diverted_for_load", "policy", "draining", "isolation", "tail"):
        taken = min(over, parts[name])
        parts[name] -= taken
        over -= taken
    parts["delivered"] -= over
    return list(parts.items())


def _steps(
    moments: Sequence[Moment],
    timeline: Timeline,
    present: Sequence[str],
    stacks: Sequence[dict[str, int]],
) -> Table:
    rows = [
        [
            _clock(moment.at, timeline),
            f"{moment.totals['requests']:,}",
            f"{moment.totals['prompt']:,}",
            *(f"{stack[name]:,}" for name in present),
            seconds(moment.ttft_hit_s),
            seconds(moment.ttft_none_s),
        ]
        for moment, stack in zip(moments, stacks, strict=True)
    ]
    head = ["from", "requests", "prompt", *present, "ttft hit", "ttft none"]
    return Table(head, rows)


def _lines(moments: Sequence[Moment]) -> tuple[list[dict[str, Any]], str]:
    enough = [moment.totals["requests"] >= LEAST_REQUESTS for moment in moments]
    hit = [each.ttft_hit_s if some else None for each, some in zip(moments, enough, strict=True)]
    none = [each.ttft_none_s if some else None for each, some in zip(moments, enough, strict=True)]
    series = {"hit-line": ("with a hit", hit), "none-line": ("without", none)}
    known = [value for _, values in series.values() for value in values if value is not None]
    if not known:
        return [], ""
    top = max(known) or 1.0
    lines = [
        {"name": name, "text": text, "runs": _runs(values, top)}
        for name, (text, values) in series.items()
        if any(value is not None for value in values)
    ]
    return lines, seconds(top)


def _runs(values: Sequence[Number], top: float) -> list[str]:
    """Points of each stretch without a hole; a lone point is a short dash."""
    width = 100 / len(values)
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(((at + 0.5) * width, 100 - 96 * value / top))
    drawn = []
    for run in runs:
        if len(run) == 1:
            (x, y) = run[0]
            run = [(x - width / 4, y), (x + width / 4, y)]  # noqa: PLW2901 - drawn instead
        if run:
            drawn.append(" ".join(f"{x:.2f},{y:.2f}" for x, y in run))
    return drawn


def _thirds(count: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys((0, count // 2, count - 1)))


def _clock(at: float, timeline: Timeline) -> str:
    moment = datetime.fromtimestamp(at, UTC)
    if timeline.step_s < 60:
        return f"{moment:%H:%M:%S}"
    days = timeline.moments[-1].at - timeline.moments[0].at
    return f"{moment:%d %b %H:%M}" if days > 86_400 else f"{moment:%H:%M}"


def _length(step_s: float) -> str:
    return f"{step_s / 3600:g} h" if step_s >= 3600 else f"{step_s / 60:g} min"
