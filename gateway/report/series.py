"""The report over time."""

from __future__ import annotations

from math import ceil, floor

from gateway.report.columns import TERMS
from gateway.report.model import Moment, Number, Timeline, TrustShare
from gateway.report.query import Query
from gateway.report.tables import natural

STEPS = 60
"""About so many steps."""
MOST_WORKERS = 256
"""So many workers have a line of their own in the trust timeline."""
_LENGTHS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400,
            21_600, 43_200, 86_400)  # fmt: skip
"""Steps that a clock shows, in seconds."""
_STATES = ("exact", "learned", "blind")


def timeline(query: Query, first: Number, last: Number) -> Timeline:
    """From the first to the last record, in at most about :data:`STEPS` steps."""
    if first is None or last is None:
        return Timeline(step_s=1.0, moments=[], trust=[])
    step = step_of(last - first)
    origin = floor(first / step) * step
    count = floor((last - origin) / step) + 1
    at = f"CAST(floor((arrived - {origin!r}) / {step!r}) AS INTEGER)"
    return Timeline(
        step_s=step,
        moments=_moments(query, at, origin, step, count),
        trust=_trust(query, at, count),
    )


def step_of(length_s: float) -> float:
    """The shortest of the usual steps of which a range takes at most some :data:`STEPS`."""
    for step in _LENGTHS:
        if length_s / step <= STEPS:
            return float(step)
    return float(_LENGTHS[-1] * ceil(length_s / STEPS / _LENGTHS[-1]))


def _moments(query: Query, at: str, origin: float, step: float, count: int) -> list[Moment]:
    sums = ", ".join(f"sum(t_{name})" for name in TERMS)
    found = {
        row[0]: row[1:]
        for row in query.rows(f"""
            SELECT {at} AS step,
                   {query.quantile}(ttft_s, 0.5) FILTER (depth IN ('partial', 'full')),
                   {query.quantile}(ttft_s, 0.5) FILTER (depth = 'none'), count(*), {sums}
            FROM finals GROUP BY step
        """)
    }
    nothing = (None, None, *[0] * (1 + len(TERMS)))
    moments = []
    for number in range(count):
        hit, none, *sums_ = found.get(number, nothing)
        totals = dict(zip(("requests", *TERMS), map(int, sums_), strict=True))
        moments.append(
            Moment(
                at=round(origin + number * step, 3), totals=totals, ttft_hit_s=hit, ttft_none_s=none
            )
        )
    return moments


def _trust(query: Query, at: str, count: int) -> list[TrustShare]:
    shares: dict[str, dict[str, list[int]]] = {}
    for worker, state, step, requests in query.rows(f"""
        SELECT worker, trust, {at} AS step, count(*) FROM attempts
        WHERE worker IN (SELECT worker FROM attempts WHERE worker <> '' AND trust <> ''
                         GROUP BY worker ORDER BY count(*) DESC, worker LIMIT {MOST_WORKERS})
          AND trust IN {_STATES}
        GROUP BY ALL
    """):
        lines = shares.setdefault(worker, {name: [0] * count for name in _STATES})
        lines[state][step] = requests
    return [TrustShare(worker=worker, **shares[worker]) for worker in sorted(shares, key=natural)]
