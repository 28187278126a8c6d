"""The sums of a report, in SQL over the tables of ``load.py``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import duckdb

from gateway.records import TokenFlow
from gateway.report.columns import TERMS
from gateway.report.load import LedgerError
from gateway.report.model import (
    DEPTHS,
    Attempts,
    Balance,
    Group,
    Number,
    Prediction,
    Ratio,
    Section,
    Spread,
    WorkerShare,
)
from gateway.report.tables import natural

DIMENSIONS = ("model", "tenant", "worker", "family", "policy")
EXACT_RECORDS = 5_000_000
"""Up to here percentiles are exact, which holds every value in memory."""

LOOKUPS = {
    "too_short": "t_prompt > 0 AND t_prompt = t_tail",
    "nothing_known": "t_prompt <> t_tail AND t_available = 0 OR t_prompt = 0",
    "known_not_chosen": "t_prompt <> t_tail AND t_available > 0 AND t_captured = 0",
    "chosen": "t_prompt <> t_tail AND t_captured > 0",
}

Key = tuple[str, ...]


class Query:
    """Asks one database; every method is a read."""

    def __init__(self, db: duckdb.DuckDBPyConnection, records: int) -> None:
        """``db`` as filled by ``load.load``."""
        self._db = db
        self.percentiles = "exact" if records <= EXACT_RECORDS else "approximate"
        self.quantile = "quantile_cont" if records <= EXACT_RECORDS else "approx_quantile"

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """All rows."""
        return self._db.execute(sql).fetchall()

    def total(self) -> Section:
        """Over all requests."""
        (section,) = self._sections(()).values()
        return section

    def groups(self, by: Sequence[str]) -> list[Group]:
        """Largest prompt first.

        :raises LedgerError: the groups do not add up to the total.
        """
        sections = sorted(
            self._sections(tuple(by)).items(), key=lambda at: (-at[1].totals["prompt"], at[0])
        )
        return [
            Group(
                key=dict(zip(by, key, strict=True)),
                totals=section.totals,
                rates=section.rates,
                lookups=section.lookups,
                ttft_s=section.ttft_s,
                itl_s=section.itl_s,
            )
            for key, section in sections
        ]

    def _sections(self, by: Key) -> dict[Key, Section]:
        dims = "".join(f"{name}, " for name in by)
        grouped = f"GROUP BY {', '.join(by)}" if by else ""
        sums = ", ".join(f"coalesce(sum(t_{name}), 0)" for name in TERMS)
        kinds = ", ".join(f"count(*) FILTER ({condition})" for condition in LOOKUPS.values())
        ttft, itl = self._spreads("ttft_s", by), self._spreads("itl_s", by)
        found: dict[Key, Section] = {}
        for row in self.rows(f"SELECT {dims} count(*), {sums}, {kinds} FROM finals {grouped}"):
            key, counts = row[: len(by)], [int(value) for value in row[len(by) :]]
            totals = dict(zip(("requests", *TERMS), counts, strict=False))
            lookups = dict(zip(LOOKUPS, counts[1 + len(TERMS) :], strict=True))
            _verify(totals, lookups)
            found[key] = Section(
                totals=totals,
                rates={name: share(totals[name], totals["prompt"]) for name in RATES},
                lookups=lookups,
                ttft_s={depth: ttft.get((*key, depth), Spread()) for depth in ("all", *DEPTHS)},
                itl_s={depth: itl.get((*key, depth), Spread()) for depth in ("all", *DEPTHS)},
            )
        return found

    def _spreads(self, column: str, by: Key) -> dict[Key, Spread]:
        """Spread of a column by (``by``..., depth or ``all``)."""
        dims = "".join(f"{name}, " for name in by)
        rows = self.rows(f"""
            SELECT {dims} coalesce(depth, 'all'), count(*), avg({column}),
                   {self.quantile}({column}, [0.5, 0.9, 0.99])
            FROM finals WHERE {column} IS NOT NULL
            GROUP BY GROUPING SETS (({dims} depth), ({dims.rstrip(", ")}))
        """)
        return {row[: len(by) + 1]: Spread(row[-3], row[-2], *row[-1]) for row in rows if row[-3]}

    def balance(self) -> Balance:
        """By worker; requests that got none are left out."""
        trust: dict[str, dict[str, int]] = {}
        for worker, state, count in self.rows(
            "SELECT worker, trust, count(*) FROM finals WHERE trust <> '' GROUP BY ALL ORDER BY ALL"
        ):
            trust.setdefault(worker, {})[state] = count
        workers = [
            WorkerShare(
                worker=worker,
                attempts=attempts,
                failed=failed,
                requests=requests,
                prompt=int(prompt),
                delivered=int(delivered),
                computed=int(prompt - delivered),
                stale_index=int(stale),
                ttft_p50_s=ttft and ttft[0],
                ttft_p90_s=ttft and ttft[1],
                trust=trust.get(worker, {}),
            )
            for worker, attempts, failed, requests, prompt, delivered, stale, ttft in self.rows(f"""
                SELECT worker, count(*), count(*) FILTER (outcome = 'upstream_error'),
                       count(*) FILTER (final), sum(t_prompt), sum(t_delivered),
                       sum(t_stale_index),
                       {self.quantile}(ttft_s, [0.5, 0.9]) FILTER (final AND ttft_s IS NOT NULL)
                FROM attempts WHERE worker <> '' GROUP BY worker ORDER BY worker
            """)
        ]
        workers.sort(key=lambda each: natural(each.worker))
        return Balance(
            workers,
            {
                name: _max_over_mean([getattr(worker, name) for worker in workers])
                for name in ("requests", "prompt", "computed")
            },
        )

    def counts(self, column: str, table: str = "finals", where: str = "true") -> dict[str, int]:
        """How often each value occurs, most frequent first."""
        return {
            str(value): count
            for value, count in self.rows(f"""
                SELECT {column} AS value, count(*) AS n FROM {table} WHERE {where}
                GROUP BY value ORDER BY n DESC, value
            """)
        }

    def attempts(self) -> Attempts:
        """Retries and why."""
        ((attempts, retried),) = self.rows("""
            SELECT count(*) FILTER (attempt > 0), count(*) FILTER (final AND attempt > 1)
            FROM attempts
        """)
        return Attempts(
            attempts=attempts,
            retried_requests=retried,
            by_attempts=self.counts("attempt"),
            retry_reasons=self.counts("outcome", "attempts", "NOT final"),
        )

    def prediction(self) -> Prediction:
        """Only requests whose engine told ``cached_tokens`` count."""
        ((told, exact, over, under, error, wrong, prompt),) = self.rows("""
            SELECT count(*), count(*) FILTER (t_captured = t_delivered),
                   count(*) FILTER (t_captured > t_delivered),
                   count(*) FILTER (t_captured < t_delivered),
                   avg(abs(t_captured - t_delivered)),
                   sum(t_stale_index + t_token_mismatch + t_gained), sum(t_prompt)
            FROM finals WHERE reported AND t_prompt > 0
        """)
        bins = ", ".join(
            f"count(*) FILTER ({_between('predicted_s / ttft_s', low, high)})"
            for low, high in pairwise(RATIOS)
        )
        ((timed, off, ratio, *spread),) = self.rows(f"""
            SELECT count(*), avg(abs(predicted_s - ttft_s)),
                   {self.quantile}(predicted_s / ttft_s, 0.5), {bins}
            FROM finals WHERE predicted_s IS NOT NULL AND ttft_s > 0
        """)
        wrong_share = share(wrong or 0, prompt or 0)
        return Prediction(
            requests=told,
            exact=exact,
            promised_too_much=over,
            promised_too_little=under,
            mean_abs_error_tokens=error,
            error_percent=None if wrong_share is None else 100 * wrong_share,
            ttft_requests=timed,
            ttft_mean_abs_error_s=off,
            ttft_median_ratio=ratio,
            ttft_ratios=[
                Ratio(low, high, count)
                for (low, high), count in zip(pairwise(RATIOS), spread, strict=True)
            ],
        )


RATES = ("available", "captured", "delivered")
RATIOS: tuple[Number, ...] = (None, 0.25, 0.5, 0.8, 0.95, 1.05, 1.25, 2, 4, None)
"""Bounds between which predicted / actual is counted."""


def _between(value: str, low: Number, high: Number) -> str:
    bounds = ([f"{value} >= {low}"] if low is not None else []) + (
        [f"{value} < {high}"] if high is not None else []
    )
    return " AND ".join(bounds)


def share(part: float, whole: float) -> Number:
    """``part / whole``; None if there is no whole."""
    return part / whole if whole else None


def _max_over_mean(values: Sequence[int]) -> Number:
    return share(max(values) * len(values), sum(values)) if values else None


def _verify(totals: dict[str, int], lookups: dict[str, int]) -> None:
    """The last line of defence: no report is given whose sums do not close."""
    try:
        TokenFlow(**{name: totals[name] for name in TERMS}).check()
    except ValueError as error:
        raise LedgerError(f"the sums do not close: {error}") from error
    if sum(lookups.values()) != totals["requests"]:
        raise LedgerError(f"look-ups {lookups} do not add up to {totals['requests']} requests")
