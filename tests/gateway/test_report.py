"""The report's figures: planted losses, time ranges, percentiles, and files that are not whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
from ledgerkit import START, hit, record, write_ledger

from gateway.ledgerline import encode_record
from gateway.records import Outcome, RequestRecord, TokenFlow
from gateway.report import EmptyLedger, LedgerError, Report, parse_since, summarise, to_json
from shared.errors import ConfigError

NAMES = (
    "requests prompt tail cold evicted available captured diverted_for_load draining policy "
    "isolation delivered stale_index token_mismatch unreported gained"
).split()

LOSSES = (
    "tail cold evicted diverted_for_load draining policy isolation stale_index token_mismatch "
    "unreported"
).split()


def report_on(folder: Path, records: Sequence[RequestRecord], *by: str) -> Report:
    """Report on a ledger of these records."""
    return summarise([write_ledger(folder / "l.jsonl", records)], by=by)


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    ranked = sorted(values)
    place = q * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_planted_loss_appears_under_its_name_to_the_token(tmp_path: Path, loss: str) -> None:
    lost = {"tail": 0, "cold": 0, "evicted": 0, loss: 37}
    known = 100 - lost["tail"] - lost["cold"] - lost["evicted"]
    before = loss in {"diverted_for_load", "draining", "policy", "isolation"}
    captured = known - 37 * before
    after = loss in {"stale_index", "token_mismatch", "unreported"}
    flow = TokenFlow(
        prompt=100,
        available=known,
        captured=captured,
        delivered=captured - 37 * after,
        **{name: tokens for name, tokens in lost.items() if tokens},
    )
    report = report_on(tmp_path, [record(flow=flow), record(flow=hit(100, 100))])
    expected = dict.fromkeys(NAMES, 0) | {
        "requests": 2,
        "prompt": 200,
        "available": known + 100,
        "captured": captured + 100,
        "delivered": flow.delivered + 100,
        loss: 37,
    }
    assert report.totals == expected


def test_gained_tokens_are_counted_beside_the_promise(tmp_path: Path) -> None:
    flow = TokenFlow(prompt=64, cold=64, delivered=48, gained=48)
    totals = report_on(tmp_path, [record(flow=flow)]).totals
    assert (totals["gained"], totals["delivered"], totals["captured"]) == (48, 48, 0)


def test_json_has_the_public_names_in_their_order_per_group_too(tmp_path: Path) -> None:
    report = report_on(tmp_path, [record(flow=hit(32, 16))], "model", "worker")
    form = json.loads(to_json(report))
    assert list(form["totals"]) == NAMES
    assert form["groups"][0]["key"] == {"model": "m", "worker": "w1"}
    assert form["groups"][0]["totals"] == form["totals"]
    assert msgspec.json.decode(to_json(report), type=Report) == report


def test_only_final_attempts_are_requests(tmp_path: Path) -> None:
    failed = {"attempt": 1, "final": False, "outcome": Outcome.UPSTREAM_ERROR, "status": 502}
    report = report_on(
        tmp_path,
        [
            record(request_id="a", worker="w1", **failed),
            record(request_id="a", attempt=2, worker="w2", flow=hit(48, 32)),
            record(request_id="b", worker="w2", flow=hit(48, 0)),
            record(
                request_id="c",
                attempt=0,
                worker="",
                outcome=Outcome.REJECTED,
                status=503,
                reported=False,
            ),
        ],
        "worker",
    )
    assert report.totals["requests"] == 3
    assert report.attempts.attempts == 3
    assert report.attempts.retried_requests == 1
    assert report.attempts.by_attempts == {"0": 1, "1": 1, "2": 1}
    assert report.attempts.retry_reasons == {"upstream_error": 1}
    assert report.outcomes == {"ok": 2, "rejected": 1}
    assert report.statuses == {"200": 2, "503": 1}
    assert {group.key["worker"]: group.totals["requests"] for group in report.groups} == {
        "w2": 2,
        "": 1,
    }
    workers = {worker.worker: worker for worker in report.balance.workers}
    assert (workers["w1"].attempts, workers["w1"].failed, workers["w1"].requests) == (1, 1, 0)
    assert (workers["w2"].prompt, workers["w2"].computed) == (96, 64)
    assert workers["w2"].trust == {"exact": 2}
    assert report.balance.max_over_mean == {"requests": 2.0, "prompt": 2.0, "computed": 2.0}


def test_look_ups_tell_four_cases_apart_and_add_up(tmp_path: Path) -> None:
    elsewhere = TokenFlow(prompt=64, tail=16, available=48, policy=48)
    report = report_on(
        tmp_path,
        [
            record(flow=TokenFlow(prompt=9, tail=9)),
            record(flow=hit(64, 0, tail=16)),
            record(flow=TokenFlow(prompt=64, tail=16, evicted=48)),
            record(flow=elsewhere),
            record(flow=hit(64, 32, tail=16)),
            record(outcome=Outcome.REJECTED, attempt=0),
        ],
    )
    assert report.lookups == {
        "too_short": 1,
        "nothing_known": 3,
        "known_not_chosen": 1,
        "chosen": 1,
    }
    assert sum(report.lookups.values()) == report.totals["requests"]


def test_percentiles_are_those_of_plain_arithmetic_by_depth(tmp_path: Path) -> None:
    times = [0.01 * (n * 37 % 101 + 1) for n in range(101)]
    flows = {"none": hit(64, 0, 16), "partial": hit(64, 16, 16), "full": hit(64, 48, 16)}
    depths = [("none", "partial", "full", "full", "full")[n % 5] for n in range(101)]
    records = [
        record(flow=flows[depth], ttft_s=round(time, 5), itl_s=round(time / 10, 5))
        for time, depth in zip(times, depths, strict=True)
    ]
    records.append(record(flow=hit(64, 0, 16), reported=False, ttft_s=2.5))
    records.append(record(flow=hit(64, 0, 16)))  # no first token: in no percentile
    report = report_on(tmp_path, records)
    for depth in flows:
        mine = [time for time, at in zip(times, depths, strict=True) if at == depth]
        spread, between = report.ttft_s[depth], report.itl_s[depth]
        assert spread.count == len(mine)
        assert spread.mean == pytest.approx(fmean(mine))
        assert spread.p50 == pytest.approx(quantile(mine, 0.5))
        assert spread.p90 == pytest.approx(quantile(mine, 0.9))
        assert spread.p99 == pytest.approx(quantile(mine, 0.99))
        assert between.p90 == pytest.approx(quantile(mine, 0.9) / 10, rel=1e-3)
    assert report.ttft_s["unknown"].count == 1
    assert report.ttft_s["all"].count == 102
    assert report.ttft_s["all"].p99 == pytest.approx(quantile([*times, 2.5], 0.99))
    assert report.percentiles == "exact"


def test_savings_come_from_the_slope_of_cold_requests_per_model(tmp_path: Path) -> None:
    """0.05 s of waiting and 1 ms a token: the slope is the token's price, the median is dearer."""
    cold = [record(flow=hit(n, 0), ttft_s=0.05 + 0.001 * n) for n in range(100, 900, 100)]
    warm = [record(flow=hit(1000, 900), ttft_s=0.15), record(flow=hit(1000, 500), ttft_s=0.55)]
    few = [
        record(model="few", flow=hit(200, 0), ttft_s=0.4),
        record(model="few", flow=hit(200, 100)),
    ]
    blind = [record(model="blind", flow=hit(50, 25), ttft_s=0.1)]
    saved = report_on(tmp_path, cold + warm + few + blind).saved
    rates = {rate.model: rate for rate in saved.models}
    assert (rates["m"].method, rates["m"].cold_requests) == ("slope", 8)
    assert rates["m"].s_per_token == pytest.approx(0.001)
    assert rates["m"].prefill_s == pytest.approx(1.4)
    assert (rates["few"].method, rates["few"].s_per_token) == ("median", pytest.approx(0.002))
    assert (rates["blind"].method, rates["blind"].prefill_s) == ("none", None)
    assert saved.tokens == 1525
    assert saved.prefill_s == pytest.approx(1.6)
    per_request = 100 * fmean([0.9 / 1.05, 0.5 / 1.05])
    assert saved.ttft_reduction_percent["per_request"] == pytest.approx(per_request)
    mean_hit = fmean([0.15, 0.55, 0.1])
    mean_cold = fmean([0.05 + 0.001 * n for n in range(100, 900, 100)] + [0.4])
    assert saved.ttft_reduction_percent["hit_vs_none"] == pytest.approx(
        100 * (1 - mean_hit / mean_cold)
    )


def test_predictions_are_compared_only_where_the_engine_told(tmp_path: Path) -> None:
    stale = TokenFlow(prompt=100, cold=40, available=60, captured=60, delivered=50, stale_index=10)
    gained = TokenFlow(prompt=100, cold=100, delivered=20, gained=20)
    untold = TokenFlow(prompt=100, cold=40, available=60, captured=60, unreported=60)
    report = report_on(
        tmp_path,
        [
            record(flow=stale, ttft_s=0.2, predicted_ttft_s=0.1),
            record(flow=gained, ttft_s=0.1, predicted_ttft_s=0.1),
            record(flow=hit(100, 50)),
            record(flow=untold, reported=False),
        ],
    )
    told = report.prediction
    assert (told.requests, told.exact, told.promised_too_much, told.promised_too_little) == (
        3,
        1,
        1,
        1,
    )
    assert told.mean_abs_error_tokens == pytest.approx(10)
    assert told.error_percent == pytest.approx(10)
    assert told.ttft_requests == 2
    assert told.ttft_median_ratio == pytest.approx(0.75)
    assert told.ttft_mean_abs_error_s == pytest.approx(0.05)
    assert report.untold_requests == 1
    assert report.ttft_s["unknown"].count == 0


def test_families_are_ranked_by_prompt_tokens(tmp_path: Path) -> None:
    records = [record(family=f"{n:02}", flow=hit(10 + n, n), worker=f"w{n % 2}") for n in range(12)]
    records.append(record(family="11", flow=hit(100, 100), worker="w0"))
    families = report_on(tmp_path, records).families
    assert [family.family for family in families[:3]] == ["11", "10", "09"]
    assert len(families) == 10
    assert (families[0].prompt, families[0].delivered, families[0].workers) == (121, 111, 2)


def test_since_leaves_out_earlier_requests(tmp_path: Path) -> None:
    file = write_ledger(
        tmp_path / "l.jsonl",
        [record(at=START + minute * 60, flow=hit(10, 0)) for minute in range(10)],
    )
    report = summarise([file], since=START + 5 * 60)
    assert report.totals["requests"] == 5
    assert (report.first_at, report.last_at) == (START + 300, START + 540)
    with pytest.raises(EmptyLedger, match=r"no records in .* in that time"):
        summarise([file], since=START + 3600)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30m", START - 1800),
        ("1h", START - 3600),
        ("2d", START - 172_800),
        ("1.5h", START - 5400),
        ("2026-07-28T10:00", START),
        ("2026-07-28T12:00+02:00", START),
        ("2026-07-28", START - 36_000),
    ],
)
def test_since_reads_spans_and_iso_times(text: str, expected: float) -> None:
    assert parse_since(text, START) == expected


@pytest.mark.parametrize("text", ["yesterday", "1y", "-1h", "h", ""])
def test_since_refuses_everything_else(text: str) -> None:
    with pytest.raises(ConfigError, match="--since"):
        parse_since(text, START)


def test_folders_globs_and_compressed_files_are_read_once(tmp_path: Path) -> None:
    write_ledger(tmp_path / "a.jsonl", [record(flow=hit(1, 0))])
    write_ledger(tmp_path / "b.jsonl.gz", [record(flow=hit(10, 0))])
    write_ledger(tmp_path / "c[1]*.jsonl", [record(flow=hit(100, 0))])
    write_ledger(tmp_path / "c1-like-the-pattern.jsonl", [record(flow=hit(1000, 0))])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").write_text("not a ledger")
    (tmp_path / "link").symlink_to(tmp_path)
    whole = summarise([tmp_path, tmp_path / "link" / "a.jsonl", str(tmp_path / "*.gz")])
    assert whole.totals["prompt"] == 1111
    assert len(whole.files) == 5
    assert summarise([tmp_path / "c[1]*.jsonl"]).totals["prompt"] == 100
    assert summarise([str(tmp_path / "*.gz")]).totals["prompt"] == 10


@pytest.mark.parametrize("name", ["l.jsonl", "l.jsonl.gz"])
@pytest.mark.parametrize("kept", [1, 40, 90])
def test_a_torn_last_line_is_left_out_counted_and_named(
    tmp_path: Path, name: str, kept: int
) -> None:
    torn = encode_record(record(flow=hit(7, 0)))[:kept]
    file = write_ledger(tmp_path / name, [record(flow=hit(10, 0))] * 3, rest=torn)
    report = summarise([file])
    assert report.totals["prompt"] == 30
    assert report.skipped_lines == 1
    assert (report.skipped[0].file, report.skipped[0].line) == (str(file), 4)


def test_lines_torn_anywhere_are_all_counted(tmp_path: Path) -> None:
    good = encode_record(record(flow=hit(10, 0)))
    garbled = b'{"at":1,"id":"cut\n' + good + b"\xff\xfe\n\n" + b"\0" * 64 + b"\n" + good
    report = summarise([write_ledger(tmp_path / "l.jsonl", [record()], rest=garbled)])
    assert report.totals["requests"] == 3
    assert report.skipped_lines == 3
    assert [skipped.line for skipped in report.skipped] == [2, 4, 6]


def test_a_whole_last_line_without_a_newline_counts(tmp_path: Path) -> None:
    file = write_ledger(tmp_path / "l.jsonl", [], rest=encode_record(record())[:-1])
    report = summarise([file])
    assert (report.totals["requests"], report.skipped_lines) == (1, 0)


def test_dropped_records_are_told(tmp_path: Path) -> None:
    lines = b'{"at":1785232801.0,"dropped":5}\n{"at":1785232802.0,"dropped":2}\n'
    report = summarise([write_ledger(tmp_path / "l.jsonl", [record()], rest=lines)])
    assert (report.dropped_records, report.totals["requests"]) == (7, 1)


@pytest.mark.parametrize(
    ("flow", "reason"),
    [
        (TokenFlow(prompt=10, cold=9), "prompt does not close"),
        (TokenFlow(prompt=10, cold=4, available=6, captured=5, delivered=5), "available does not"),
        (TokenFlow(prompt=10, cold=10, delivered=1), "delivered does not close"),
        (TokenFlow(prompt=10, cold=11, tail=-1), "tail is negative"),
    ],
)
def test_a_record_that_does_not_close_is_refused_by_name(
    tmp_path: Path, flow: TokenFlow, reason: str
) -> None:
    bad = record(at=START + 9, request_id="the-bad-one", flow=flow)
    file = write_ledger(tmp_path / "l.jsonl", [record(), record(), bad, bad])
    with pytest.raises(LedgerError, match=rf"l\.jsonl:3: request the-bad-one: {reason}"):
        summarise([file])
    with pytest.raises(LedgerError, match=r"l\.jsonl:3"):
        summarise([file], since=START + 5)
    with pytest.raises(EmptyLedger):
        summarise([file], since=START + 10)


def test_an_attempt_that_is_not_final_may_carry_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="not final carries tokens"):
        report_on(tmp_path, [record(final=False, flow=hit(10, 0))])


@pytest.mark.parametrize(
    "line",
    [
        b'{"at":"soon","id":"a","route":"chat","model":"m"}',
        b'{"hello":"world"}',
        b"null",
        b"[1]",
        b'{"at":1,"id":"a","route":"chat","model":"m","flow":{"prompt":"many"}}',
    ],
)
def test_json_that_is_no_record_is_refused_by_name(tmp_path: Path, line: bytes) -> None:
    file = write_ledger(tmp_path / "l.jsonl", [record()], rest=line + b"\n")
    with pytest.raises(LedgerError, match=r"l\.jsonl:2: not a ledger record"):
        summarise([file])


def test_paths_that_cannot_be_read_are_usage_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "*.jsonl"):
        with pytest.raises(ConfigError, match="no such file or folder"):
            summarise([path])
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(b"no gzip at all")
    with pytest.raises(ConfigError, match=r"ledger: .*broken"):
        summarise([broken])


def test_an_empty_ledger_says_so(tmp_path: Path) -> None:
    with pytest.raises(EmptyLedger, match=f"no ledger files in {tmp_path}: "):
        summarise([tmp_path])
    (tmp_path / "l.jsonl").touch()
    with pytest.raises(EmptyLedger, match="no records in"):
        summarise([tmp_path])
    (tmp_path / "l.jsonl").write_text("this is\nprose\n")
    with pytest.raises(EmptyLedger, match=r"2 unreadable lines, first .*l\.jsonl:1"):
        summarise([tmp_path])
