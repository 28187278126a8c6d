"""The JSON views of several processes as one: workers, last requests, the dashboard's state. Pure.

All processes see the same workers; what differs is what each has sent to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]

SUMMED = ("inflight", "requests", "prompt_tokens", "cached_tokens")
"""Of a worker: what each process counts for itself."""
LARGEST = ("index_blocks", "index_host_blocks", "failure_rate", "learned_tokens")
TRUST = ("blind", "learned", "exact")
TIMES = ("ttft_hit_s", "ttft_none_s")


def merge_workers(views: Sequence[Json]) -> Json:
    """``GET /admin/workers`` of all processes, the most senior first.

    A worker that is not ready for one of them shows as that one sees it; its trust is the lowest.
    """
    lists: dict[str, Json] = {}
    for one in (each for view in views for each in view["lists"]):
        known = lists.setdefault(one["source"], one)
        if one.get("fault") and not known.get("fault"):
            lists[one["source"]] = one
    workers = worker_rows([view["workers"] for view in views])
    return {"workers": workers, "lists": list(lists.values()), "processes": len(views)}


def worker_rows(views: Sequence[Sequence[Json]]) -> list[Json]:
    """Rows about workers, by id, in the order in which they are met."""
    by_id: dict[str, list[Json]] = {}
    for row in (each for view in views for each in view):
        by_id.setdefault(row["id"], []).append(row)
    return [_row(rows) for rows in by_id.values()]


def _row(rows: Sequence[Json]) -> Json:
    row = dict(rows[0])
    for name in SUMMED:
        if name in row:
            row[name] = sum(each[name] for each in rows)
    for name in LARGEST:
        if name in row:
            row[name] = max(each[name] for each in rows)
    unwell = next((each for each in rows if each["state"] != "ready"), row)
    least = min(rows, key=lambda each: TRUST.index(each["trust"]))
    row |= {name: unwell[name] for name in ("state", "reason")}
    row |= {name: least[name] for name in ("trust", "trust_reason")}
    if "sources" in row:
        row["sources"] = sorted({name for each in rows for name in each["sources"]})
    return row


def merge_recent(views: Iterable[Sequence[Json]], limit: int) -> list[Json]:
    """The last requests of all, newest first."""
    every = [line for view in views for line in view]
    return sorted(every, key=lambda line: -float(line["at"]))[:limit]


def merge_states(states: Sequence[Json], limit: int) -> Json:
    """The dashboard's state.

    Steps of time are set side by side by their ends (processes begin them at moments of their
    own); a median of all is taken as the processes' medians, weighted by their requests.
    """
    windows = [state["window"] for state in states]
    return {
        "at": max(state["at"] for state in states),
        "totals": _sums(state["totals"] for state in states),
        "window": {
            "seconds": max(window["seconds"] for window in windows),
            "totals": _sums(window["totals"] for window in windows),
            **{n: _mean([(w[n], w["totals"]["requests"]) for w in windows]) for n in TIMES},
        },
        "series": _series([state["series"] for state in states]),
        "families": _families([state["families"] for state in states]),
        "reasons": _sums(state["reasons"] for state in states),
        "outcomes": _sums(state["outcomes"] for state in states),
        "workers": worker_rows([state["workers"] for state in states]),
        "recent": merge_recent([state["recent"] for state in states], limit),
        "processes": len(states),
    }


def _sums(tables: Iterable[Json]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for table in tables:
        sums.update(table)
    return dict(sums)


def _mean(pairs: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None and weight]
    if not known:
        return None
    weights = sum(weight for _, weight in known)
    return round(sum(value * weight for value, weight in known) / weights, 5)


def _series(series: Sequence[Json]) -> Json:
    steps = max(len(one["requests"]) for one in series)

    def column(one: Json, name: str) -> list[Any]:
        values = list(one.get(name, ()))
        return [None] * (steps - len(values)) + values

    names = dict.fromkeys(name for one in series for name in one if name != "step_s")
    merged: Json = {"step_s": series[0]["step_s"]}
    for name in names:
        rows = list(zip(*(column(one, name) for one in series), strict=True))
        if name in TIMES:
            weights = list(zip(*(column(one, "requests") for one in series), strict=True))
            merged[name] = [
                _mean([(v, w or 0) for v, w in zip(row, weight, strict=True)])
                for row, weight in zip(rows, weights, strict=True)
            ]
        else:
            merged[name] = [sum(value or 0 for value in row) for row in rows]
    return merged


def _families(views: Sequence[Sequence[Json]]) -> list[Json]:
    """Each process tells its largest ones: a family that is small in one may count too little."""
    merged: dict[str, Json] = {}
    for family in (each for view in views for each in view):
        known = merged.get(family["family"])
        if known is None:
            merged[family["family"]] = dict(family)
            continue
        for name in ("requests", "prompt", "delivered"):
            known[name] += family[name]
    largest = sorted(merged.values(), key=lambda family: -int(family["prompt"]))
    return largest[: max(map(len, views), default=0)]
