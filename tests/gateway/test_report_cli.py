"""``headwater report`` as it is typed: text for people, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ledgerkit import START, headwater, hit, record, write_ledger

from gateway.records import Outcome, RequestRecord, TokenFlow
from gateway.report import summarise, to_text
from gateway.report.tables import amount, per_hundred, printable, seconds


def sample() -> list[RequestRecord]:
    """1,000 prompt tokens of which 60 % could be reused and 50 % were, and a retry."""
    lost = TokenFlow(
        prompt=500,
        tail=10,
        cold=290,
        available=200,
        captured=150,
        diverted_for_load=50,
        delivered=100,
        stale_index=50,
    )
    return [
        record(flow=hit(500, 400, tail=0), ttft_s=0.1, itl_s=0.01, family="aa", worker="w2"),
        record(at=START + 60, flow=lost, ttft_s=0.2, itl_s=0.02, family="bb"),
        record(final=False, outcome=Outcome.UPSTREAM_ERROR),
        record(attempt=2, ttft_s=0.4, flow=TokenFlow()),
    ]


def told(folder: Path, records: list[RequestRecord], *by: str) -> list[str]:
    """Lines of the text form."""
    return to_text(summarise([write_ledger(folder / "l.jsonl", records)], by=by)).splitlines()


def test_the_first_fifteen_lines_tell_the_story(tmp_path: Path) -> None:
    story = told(tmp_path, sample())[:15]
    assert story[0] == (
        "3 requests with 1,000 prompt tokens, 2026-07-28 10:00:00 to 2026-07-28 10:01:00 UTC"
    )
    assert story[2:6] == [
        "Of every 100 prompt tokens",
        "  60.0  could be reused: some worker held them when the request came",
        "  55.0  were routed to: the chosen worker held them",
        "  50.0  were delivered: the engine says it did not compute them again",
    ]
    assert story[7] == "Where the others went"
    losses = {line.split()[1]: line.split()[0] for line in story[8:12]}
    assert losses == {
        "tail": "1.0",
        "cold": "39.0",
        "diverted_for_load": "5.0",
        "stale_index": "5.0",
    }
    phrases = [line[27:] for line in story[8:12]]
    assert "never seen before" in phrases
    assert all(len(phrase) > 15 for phrase in phrases)
    assert story[12].startswith("        nothing lost to: evicted, draining, policy, isolation")


def test_the_tables_hold_the_figures(tmp_path: Path) -> None:
    text = "\n".join(told(tmp_path, sample(), "worker"))
    assert "Prompt tokens not computed again: 500." in text
    assert "No time can be estimated" in text
    assert "Attempts: 4; 1 request retried after 1 upstream_error." in text
    assert "Prediction: 50.0 % exact, 1 promised too much, 0 too little" in text
    assert "wrong for 5.00 % of the prompt tokens" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("w")}
    assert rows["w2"] == ["w2", "1", "500", "80.0", "80.0", "80.0", "cold", "20.0", "100", "ms"]


def test_text_is_plain_and_fits_where_there_is_no_terminal(tmp_path: Path) -> None:
    long = "organisation/a-model-with-quite-a-long-name-indeed-Instruct-AWQ"
    records = [record(model=long, tenant="t" * 80, worker="w" * 80, flow=hit(10**9, 10**8))]
    lines = told(tmp_path, records, "model", "tenant", "worker", "family", "policy")
    assert max(map(len, lines)) <= 100
    assert lines[-1].split()[-4:] == ["1", "1.0", "G", "10.0", "-"][-4:]
    assert all(line.isprintable() and line == line.rstrip() for line in lines)
    report = summarise([tmp_path])
    assert "\x1b[" in to_text(report, colour=True)


def test_names_cannot_drive_the_terminal(tmp_path: Path) -> None:
    text = "\n".join(told(tmp_path, [record(model="\x1b[31m[bold]\n", flow=hit(9, 0))], "model"))
    assert "\x1b" not in text
    assert r"\x1b[31m[bold]\n" in text


def test_notes_name_what_is_missing(tmp_path: Path) -> None:
    untold = TokenFlow(prompt=10, available=10, captured=10, unreported=10)
    file = write_ledger(
        tmp_path / "l.jsonl",
        [record(flow=untold, reported=False)],
        rest=b'{"at":1785232801.0,"dropped":5}\n{"at":17',
    )
    text = " ".join(to_text(summarise([file])).split())
    assert "1 unreadable line left out" in text
    assert "l.jsonl:3" in text.replace(" ", "")
    assert "5 records missing" in text
    assert "For 1 answered request the engine did not tell what it reused" in text
    assert "--enable-prompt-tokens-details" in text


def test_a_ledger_without_prompt_tokens_makes_no_claim(tmp_path: Path) -> None:
    lines = told(tmp_path, [record(outcome=Outcome.REJECTED, attempt=0, reported=False)])
    assert lines[1] == "No prompt tokens were counted: nothing can be said about reuse."
    assert "Outcomes: 1 rejected." in lines


@pytest.mark.parametrize(
    ("part", "whole", "shown"),
    [(0, 10, "0.0"), (1, 10**6, "<0.1"), (10**6 - 1, 10**6, ">99.9"), (5, 5, "100.0"), (0, 0, "-")],
)
def test_a_share_is_never_rounded_to_nothing_or_all(part: int, whole: int, shown: str) -> None:
    assert per_hundred(part, whole) == shown


def test_numbers_and_names_read_well() -> None:
    shown = [amount(count) for count in (0, 9_999_999, 10**7, 25 * 10**8, 10**13)]
    assert shown == ["0", "9,999,999", "10.0 M", "2.5 G", "10.0 T"]
    shown = [seconds(value) for value in (None, 0.0, 0.00123, 0.0812, 0.5, 1.25, 12345.6)]
    assert shown == ["-", "0 ms", "1.23 ms", "81.2 ms", "500 ms", "1.25 s", "12,346 s"]
    assert printable("é\n\x9b") == r"é\n\x9b"


def test_json_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ledger(tmp_path / "l.jsonl", sample())
    out = tmp_path / "report.json"
    assert headwater("report", tmp_path, "--format", "json", "--by", "worker", "-o", out) == 0
    form = json.loads(out.read_text())
    assert form["totals"]["delivered"] == 500
    assert [group["key"]["worker"] for group in form["groups"]] == ["w1", "w2"]
    assert capsys.readouterr().out == ""


def test_the_ledger_is_found_in_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ledger(tmp_path / "l.jsonl", sample())
    monkeypatch.setenv("HEADWATER_LEDGER__DIR", str(tmp_path))
    assert headwater("report") == 0
    assert "3 requests" in capsys.readouterr().out
    default = tmp_path / "state" / "headwater" / "ledger"
    default.mkdir(parents=True)
    write_ledger(default / "l.jsonl", sample()[:1])
    monkeypatch.delenv("HEADWATER_LEDGER__DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert headwater("report") == 0
    assert "1 request with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--format", "xml"], "--format: 'xml': is none of text, json"),
        (["--by", "model,colour"], "--by: 'colour': is none of model, tenant, worker"),
        (["--since", "soon"], "--since: 'soon': is no duration"),
        (["/no/such/place"], "ledger: '/no/such/place': no such file or folder"),
        (["-o", "/no/such/place/out.txt"], "-o: '/no/such/place/out.txt': cannot be written"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    ledger = [] if arguments[0].startswith("/") else [write_ledger(tmp_path / "l.jsonl", sample())]
    assert headwater("report", *ledger, *arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"headwater: {line}")


def test_an_empty_or_false_ledger_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "l.jsonl"
    file.touch()
    assert headwater("report", file) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error == f"headwater report: no records in {file}"
    write_ledger(file, [record(flow=TokenFlow(prompt=3))])
    assert headwater("report", file) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"headwater report: {file}:1: request r1: prompt does not close")
