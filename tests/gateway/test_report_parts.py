"""The report over time, its counterfactual, and where families part."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledgerkit import START, hit, record, write_ledger

from gateway.records import RequestRecord, Shadow, TokenFlow
from gateway.report import Report, summarise
from gateway.report.model import Branch
from gateway.report.series import step_of


def report_on(folder: Path, records: list[RequestRecord]) -> Report:
    return summarise([write_ledger(folder / "l.jsonl", records)])


def test_steps_have_their_own_sums_and_gaps_are_there_too(tmp_path: Path) -> None:
    records = [record(at=START + at, flow=hit(100, 64), ttft_s=0.1) for at in (0, 1, 599)]
    records.append(record(at=START + 600, flow=hit(50, 0), ttft_s=0.7))
    timeline = report_on(tmp_path, records).timeline
    assert timeline.step_s == 10
    assert len(timeline.moments) == 61
    first, last = timeline.moments[0], timeline.moments[-1]
    assert (first.at, first.totals["requests"], first.totals["delivered"]) == (START, 2, 128)
    assert (first.ttft_hit_s, first.ttft_none_s) == (pytest.approx(0.1), None)
    assert (last.totals["prompt"], last.ttft_none_s) == (50, pytest.approx(0.7))
    assert [m.totals["requests"] for m in timeline.moments[1:59]] == [0] * 58


@pytest.mark.parametrize(
    ("length", "step"), [(0, 0.1), (6, 0.1), (60, 1), (3600, 60), (86_400, 1800), (1e8, 1_728_000)]
)
def test_steps_are_few_and_round(length: float, step: float) -> None:
    assert step_of(length) == step


def test_trust_is_told_by_worker_and_step(tmp_path: Path) -> None:
    states = ["learned", "learned", "exact", "blind"]
    records = [
        record(at=START + 60 * number, worker="w1", trust=state)
        for number, state in enumerate(states)
    ]
    records.append(record(at=START, worker="w2", final=False))
    one, two = report_on(tmp_path, records).timeline.trust
    assert (sum(one.learned), sum(one.exact), sum(one.blind)) == (2, 1, 1)
    assert one.learned[0] == 1
    assert one.blind[-1] == 1
    assert (two.worker, two.exact[0]) == ("w2", 1)


def test_the_counterfactual_is_what_records_say_of_the_other_choice(tmp_path: Path) -> None:
    cold = [record(flow=hit(n, 0), ttft_s=0.001 * n) for n in range(100, 900, 100)]
    told = [
        record(
            flow=hit(1000, 800),
            ttft_s=0.2,
            predicted_ttft_s=0.25,
            round_robin=Shadow(matched_tokens=matched, ttft_s=ttft),
        )
        for matched, ttft in ((0, 1.0), (400, 0.6))
    ]
    other = report_on(tmp_path, cold + told).counterfactual
    assert (other.policy, other.requests) == ("round_robin", 2)
    assert (other.matched, other.other_matched) == (1600, 400)
    assert other.ttft_mean_s == pytest.approx(0.25)
    assert other.other_ttft_mean_s == pytest.approx(0.8)
    assert other.saved_prefill_s == pytest.approx(1200 * 0.001)
    assert "Caches and queues are taken as they were" in other.how


def test_predictions_of_time_are_counted_between_bounds(tmp_path: Path) -> None:
    ratios = [0.1, 0.3, 1.0, 1.0, 1.1, 9.0]
    records = [record(ttft_s=1.0, predicted_ttft_s=value) for value in ratios]
    told = report_on(tmp_path, records).prediction
    assert sum(bin_.requests for bin_ in told.ttft_ratios) == told.ttft_requests == 6
    counts = {(bin_.low, bin_.high): bin_.requests for bin_ in told.ttft_ratios}
    assert counts[(None, 0.25)] == 1
    assert counts[(0.95, 1.05)] == 2
    assert counts[(4, None)] == 1


def prompt(family: int, path: tuple[int, ...], known: int, tokens: int = 600) -> RequestRecord:
    """A request whose first ``known`` tokens some worker held."""
    return record(family=f"{family:08x}", path=path, flow=hit(tokens, known, tokens % 16))


def leaves(branch: Branch) -> list[Branch]:
    """All branches below, itself included."""
    return [branch, *(each for child in branch.branches for each in leaves(child))]


def test_families_branch_where_their_prompts_part(tmp_path: Path) -> None:
    """Ten share 256 tokens, then six go one way and four another; those six part at about 300."""
    records = [prompt(1, (10, 20, 100 + number), 304) for number in range(6)]
    records += [prompt(1, (10, 21, 200), 512) for _ in range(4)]
    records += [prompt(2, (7,), 128, tokens=200)]
    one, two = report_on(tmp_path, records).families
    (root,) = one.tree
    # nothing parts before 128 tokens, so that is where the tree begins
    assert (root.tokens, root.requests, root.ways) == (128, 10, 2)
    six, four = root.branches
    assert (six.tokens, six.requests, six.ways, six.diverges_at) == (256, 6, 6, 304)
    assert (four.tokens, four.requests, four.ways) == (512, 4, 0)
    assert four.delivered == 4 * 512
    assert one.diverges_at == 304
    assert (two.requests, two.tree) == (1, [])


def test_only_large_branches_are_followed(tmp_path: Path) -> None:
    records = [prompt(1, (number % 20, 5), 64, tokens=300) for number in range(400)]
    (family,) = report_on(tmp_path, records).families
    (root,) = family.tree
    assert (root.tokens, root.ways) == (64, 20)
    assert len(root.branches) <= 4
    assert all(each.requests >= 2 for each in leaves(root))


def test_reasons_are_counted(tmp_path: Path) -> None:
    from gateway.records import Why

    records = [record(why=Why(code="holder")), record(why=Why(code="cheaper")), record()]
    records.append(record(why=Why(code="holder"), final=False))
    assert report_on(tmp_path, records).reasons == {"": 1, "cheaper": 1, "holder": 1}


def test_every_loss_can_be_seen_over_time(tmp_path: Path) -> None:
    flow = TokenFlow(
        prompt=100, cold=20, available=80, captured=60, diverted_for_load=20, delivered=50,
        stale_index=10,
    )  # fmt: skip
    report = report_on(tmp_path, [record(at=START + at, flow=flow) for at in (0, 100, 200)])
    for name, tokens in report.totals.items():
        assert sum(moment.totals[name] for moment in report.timeline.moments) == tokens
