"""For any ledger of records that close, the report's sums are theirs and close, however grouped."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from depth import DEPTH
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgerkit import record, write_ledger

from gateway.records import Outcome, RequestRecord, TokenFlow
from gateway.report import summarise
from gateway.report.query import DIMENSIONS

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
        attempt=draw(st.integers(0, 3)),
        flow=draw(flows()) if final else TokenFlow(),
        outcome=draw(st.sampled_from(Outcome)),
        reported=draw(st.booleans()),
        ttft_s=draw(st.none() | st.floats(0, 100)),
        **{name: draw(NAMES) for name in DIMENSIONS},
    )


@settings(max_examples=60 * DEPTH, deadline=None)
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


def sums(members: list[RequestRecord]) -> dict[str, int]:
    """The totals by plain addition."""
    return {"requests": len(members)} | {
        name: sum(getattr(each.flow, name) for each in members) for name in TERMS
    }
