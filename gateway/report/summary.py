"""Ledger files in, a :class:`Report` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.report.counterfactual import round_robin
from gateway.report.families import families
from gateway.report.load import LedgerError, Loaded, ledgers, load
from gateway.report.model import Report, Section, Skipped
from gateway.report.query import DIMENSIONS, Query
from gateway.report.savings import savings
from gateway.report.series import timeline
from shared.errors import ConfigError


def parse_by(text: str) -> tuple[str, ...]:
    """``model,tenant`` as a tuple; empty for an empty text.

    :raises ConfigError: a field that a report cannot be grouped by.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in DIMENSIONS:
            raise ConfigError("--by", name, f"is none of {', '.join(DIMENSIONS)}")
    return names


def summarise(
    paths: Sequence[str | Path],
    since: float | None = None,
    by: Sequence[str] = (),
    *,
    top_families: int = 10,
) -> Report:
    """Read ledgers (files, ``.gz`` too, folders, glob patterns) and sum them up. Blocks.

    :param since: seconds since the epoch; records of requests that arrived earlier are left out.
    :param by: some of ``DIMENSIONS``; groups for their combinations.
    :raises ConfigError: a path or a name in ``by`` is wrong.
    :raises EmptyLedger: no record there.
    :raises LedgerError: a record's sums do not close, or a line is no record.
    """
    by = parse_by(",".join(by))
    files = ledgers(paths)
    with load(files, since) as loaded:
        return _assemble(Query(loaded.db, loaded.records), loaded, by, top_families)


def _assemble(query: Query, loaded: Loaded, by: Sequence[str], top_families: int) -> Report:
    total = query.total()
    groups = query.groups(by) if by else []
    _verify_groups(total, [group.totals for group in groups])
    ((first, last),) = query.rows("SELECT min(arrived), max(arrived) FROM attempts")
    ((untold,),) = query.rows(
        "SELECT count(*) FROM finals WHERE NOT reported AND outcome = 'ok' AND t_prompt > 0"
    )
    over_time = timeline(query, first, last)
    _verify_groups(total, [moment.totals for moment in over_time.moments])
    return Report(
        totals=total.totals,
        rates=total.rates,
        lookups=total.lookups,
        ttft_s=total.ttft_s,
        itl_s=total.itl_s,
        since=loaded.since,
        first_at=first,
        last_at=last,
        files=[str(file) for file in loaded.files],
        records=loaded.records,
        skipped_lines=loaded.skipped,
        skipped=[Skipped(str(bad.file), bad.number, bad.reason) for bad in loaded.skipped_named],
        untold_requests=untold,
        dropped_records=loaded.dropped,
        percentiles=query.percentiles,
        by=list(by),
        groups=groups,
        saved=savings(query, total),
        balance=query.balance(),
        families=families(query, top_families),
        timeline=over_time,
        counterfactual=round_robin(query),
        reasons=query.counts("reason"),
        outcomes=query.counts("outcome"),
        statuses=query.counts("status"),
        attempts=query.attempts(),
        prediction=query.prediction(),
    )


def _verify_groups(total: Section, groups: Sequence[Mapping[str, int]]) -> None:
    for name, tokens in total.totals.items():
        summed = sum(group[name] for group in groups)
        if groups and summed != tokens:
            raise LedgerError(f"groups do not add up: {name} is {tokens}, its groups {summed}")
