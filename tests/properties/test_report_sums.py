"""For any ledger of records that close, the report's sums are theirs and close, however grouped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

from depth import DEPTH
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgerkit import START, record, write_ledger

from gateway.records import Outcome, RequestRecord, TokenFlow, Why
from gateway.report import Report, summarise
from gateway.report.load import load
from gateway.report.model import Group
from gateway.report.query import DIMENSIONS, Query

TERMS = TokenFlow.__struct_fields__
TOKENS = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 2**40))
NAMES = st.sampled_from(["", "a", "b", "é\n'\"", "all"])


@st.composite
def flows(draw: st.DrawFn) -> TokenFlow:
    """Any flow that closes: the free terms are drawn, the sums follow."""
    free = {name: draw(TOKENS) for name in ("tail", "cold", "evicted", "captured", "gained")}
    spread = {
        name: draw(TOKENS) for name in ("diverted_for_load", "draining", "policy", "isolation")
    }
    left = free["captured"]
    lost = {}
    for name in ("stale_index", "token_mismatch", "unreported"):
        lost[name] = draw(st.integers(0, left))
        left -= lost[name]
    available = free["captured"] + sum(spread.values())
    return TokenFlow(
        prompt=free["tail"] + free["cold"] + free["evicted"] + available,
        available=available,
        delivered=left + free["gained"],
        **free,
        **spread,
        **lost,
    )


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    """A record as a gateway may leave it: only final ones carry tokens."""
    final = draw(st.booleans())
    return record(
        final=final,
        at=START + draw(st.integers(0, 5000)) / 7,
        predicted_ttft_s=draw(st.none() | st.floats(0, 100)),
        path=tuple(draw(st.lists(st.integers(0, 3), max_size=3))),
        why=draw(st.none() | st.builds(Why, code=st.sampled_from(["holder", "only"]))),
        attempt=draw(st.integers(0, 3)),
        flow=draw(flows()) if final else TokenFlow(),
        outcome=draw(st.sampled_from(Outcome)),
        reported=draw(st.booleans()),
        ttft_s=draw(st.none() | st.floats(0, 100)),
        **{name: draw(NAMES) for name in DIMENSIONS},
    )


@settings(max_examples=25 * DEPTH, deadline=None)
@given(
    ledgers=st.lists(st.lists(records(), max_size=12), min_size=1, max_size=3),
    by=st.lists(st.sampled_from(DIMENSIONS), unique=True),
)
def test_sums_are_exact_and_close_for_any_grouping(
    ledgers: list[list[RequestRecord]], by: list[str]
) -> None:
    everything = [each for ledger in ledgers for each in ledger]
    if not everything:
        return
    with TemporaryDirectory() as folder:
        for number, ledger in enumerate(ledgers):
            write_ledger(Path(folder) / f"{number}.jsonl", ledger)
        report = summarise([folder], by=by)
    finals = [each for each in everything if each.final]
    expected: dict[tuple[str, ...], list[RequestRecord]] = {}
    for each in finals:
        expected.setdefault(tuple(getattr(each, name) for name in by), []).append(each)
    assert report.totals == sums(finals)
    if by:
        got = {tuple(group.key[name] for name in by): group.totals for group in report.groups}
        assert got == {key: sums(members) for key, members in expected.items()}
    for section in (report, *report.groups):
        terms = {name: section.totals[name] for name in TERMS}
        TokenFlow(**terms).check()
        assert sum(section.lookups.values()) == section.totals["requests"]
        timed = [section.ttft_s[d].count for d in ("none", "partial", "full", "unknown")]
        assert sum(timed) == section.ttft_s["all"].count


@settings(max_examples=4 * DEPTH, deadline=None)
@given(ledger=st.lists(records(), min_size=1, max_size=30))
def test_every_grouping_of_one_ledger_closes(ledger: list[RequestRecord]) -> None:
    """All 32 combinations of fields; steps of time, workers and families add up as well."""
    finals = [each for each in ledger if each.final]
    with TemporaryDirectory() as folder:
        file = write_ledger(Path(folder) / "l.jsonl", ledger)
        check_parts(summarise([file], top_families=100), ledger)
        with load([file], None) as loaded:
            query = Query(loaded.db, loaded.records)
            assert query.total().totals == sums(finals)
            for size in range(1, len(DIMENSIONS) + 1):
                for by in combinations(DIMENSIONS, size):
                    check_groups(query.groups(by), by, finals)


def check_groups(groups: Sequence[Group], by: Sequence[str], finals: list[RequestRecord]) -> None:
    """Each group is the sum of its members, and so are all of them together."""
    for group in groups:
        members = [
            each for each in finals if {name: getattr(each, name) for name in by} == group.key
        ]
        assert group.totals == sums(members)
        TokenFlow(**{name: group.totals[name] for name in TERMS}).check()
    assert sum(group.totals["requests"] for group in groups) == len(finals)


def check_parts(report: Report, ledger: list[RequestRecord]) -> None:
    """What else adds up to the total."""
    finals = [each for each in ledger if each.final]
    moments = [moment.totals for moment in report.timeline.moments]
    for name, tokens in report.totals.items():
        assert sum(moment[name] for moment in moments) == tokens
    for moment in moments:
        TokenFlow(**{name: moment[name] for name in TERMS}).check()
    workers = report.balance.workers
    placed = [each for each in finals if each.worker]
    assert sum(worker.requests for worker in workers) == len(placed)
    assert sum(worker.attempts for worker in workers) == sum(bool(each.worker) for each in ledger)
    assert sum(worker.prompt for worker in workers) == sum(each.flow.prompt for each in placed)
    assert sum(worker.computed + worker.delivered for worker in workers) == sum(
        each.flow.prompt for each in placed
    )
    related = [each for each in finals if each.family]
    assert sum(family.requests for family in report.families) == len(related)
    assert sum(family.prompt for family in report.families) == sum(
        each.flow.prompt for each in related
    )
    assert sum(report.outcomes.values()) == sum(report.reasons.values()) == len(finals)
    assert sum(ratio.requests for ratio in report.prediction.ttft_ratios) == (
        report.prediction.ttft_requests
    )


def sums(members: list[RequestRecord]) -> dict[str, int]:
    """The totals by plain addition."""
    return {"requests": len(members)} | {
        name: sum(getattr(each.flow, name) for each in members) for name in TERMS
    }
