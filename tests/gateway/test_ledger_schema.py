"""The ledger's schema: what each version means, what is salted, and the page that describes it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from ledgerkit import START, hit, record, write_ledger

from gateway.config import LedgerConfig
from gateway.ledger import SALT_FILE, LedgerSink, ledger_salt
from gateway.ledgerdoc import update
from gateway.ledgerline import VERSION, LedgerLine, decode_record, encode_record
from gateway.reasons import CODES
from gateway.records import RequestRecord, Shadow, Why
from gateway.report import EmptyLedger, LedgerError, read_ledger, summarise, to_json
from gateway.report.parquet import export

V1 = (
    b'{"at":1785232800.0,"id":"r1","route":"/v1/completions","model":"m","worker":"w1",'
    b'"policy":"cost","trust":"learned","flow":{"prompt":100,"cold":36,"avail":64,"captured":64,'
    b'"delivered":64},"ttft_s":0.1,"total_s":0.2}\n'
    b'{"at":1785232801.0,"id":"r2","try":0,"route":"/v1/completions","model":"m",'
    b'"outcome":"rejected","status":503}\n'
)
"""Two lines as the first version wrote them."""
WHY = Why(code="cheaper", term="wait", other="w2", other_matched=96, gap=0.25)
FULL = record(
    at=START + 0.125,
    family="0badcafe",
    path=(1, 2, 0xFFFFFF),
    client_id="trace-7",
    flow=hit(100, 64),
    prompt_tokens=100,
    matched_tokens=64,
    why=WHY,
    round_robin=Shadow(matched_tokens=32, ttft_s=0.5),
)


def test_every_field_comes_back() -> None:
    assert decode_record(encode_record(FULL)) == FULL
    failed = record(final=False, prompt_tokens=50, matched_tokens=32, why=Why(code="only"))
    assert decode_record(encode_record(failed)) == failed


def test_lines_of_version_1_mean_what_they_meant(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    file.write_bytes(V1)
    first, second = read_ledger([file])
    assert (first.policy, first.trust, first.route) == ("cost", "learned", "/v1/completions")
    assert (first.prompt_tokens, first.matched_tokens) == (100, 64)
    assert (second.policy, second.trust, second.worker) == ("", "", "")
    report = summarise([file], by=["policy"])
    assert {group.key["policy"] for group in report.groups} == {"cost", ""}
    assert report.reasons == {"": 2}
    assert report.counterfactual.requests == 0


def test_versions_can_be_mixed_in_one_file(tmp_path: Path) -> None:
    file = write_ledger(tmp_path / "l.jsonl", [FULL], rest=V1)
    report = summarise([file], by=["policy"])
    assert report.totals["requests"] == 3
    assert {group.key["policy"] for group in report.groups} == {"cost", ""}


def test_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    later = json.loads(encode_record(FULL)) | {"v": VERSION + 1}
    with pytest.raises(msgspec.ValidationError, match=f"version {VERSION + 1}"):
        decode_record(json.dumps(later).encode())
    line = json.dumps(later).encode() + b"\n"
    file = write_ledger(tmp_path / "l.jsonl", [FULL], rest=line)
    with pytest.raises(LedgerError, match=rf"l\.jsonl:2: .*version {VERSION + 1}"):
        summarise([file])


def test_what_identifies_a_prompt_is_salted() -> None:
    one, other = encode_record(FULL, b"salt one"), encode_record(FULL, b"salt two")
    for line in (one, other):
        assert FULL.family.encode() not in line
        assert decode_record(line) != FULL
    assert json.loads(one)["family"] != json.loads(other)["family"]
    assert json.loads(one)["path"] != json.loads(other)["path"]
    assert one == encode_record(FULL, b"salt one")


def test_gateways_of_a_folder_share_a_salt_and_those_of_a_secret_too(tmp_path: Path) -> None:
    sinks = [LedgerSink(LedgerConfig(dir=str(tmp_path)), name) for name in ("8000", "8010")]
    for sink in sinks:
        sink.record(FULL)
        sink.close()
    families = {each.family for each in read_ledger([tmp_path])}
    assert len(families) == 1
    assert families != {FULL.family}
    assert (tmp_path / SALT_FILE).stat().st_mode & 0o777 == 0o600
    assert len((tmp_path / SALT_FILE).read_bytes()) == 16
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert ledger_salt(tmp_path, b"s3cret") == ledger_salt(elsewhere, b"s3cret")
    assert ledger_salt(tmp_path, b"s3cret") != ledger_salt(tmp_path, b"other")
    assert not list(elsewhere.iterdir())
    assert ledger_salt(tmp_path, b"") != ledger_salt(elsewhere, b"")


def test_parquet_holds_the_same_and_is_read_like_any_ledger(tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    records = [FULL, record(request_id="r2", final=False, outcome="upstream_error", status=502)]
    write_ledger(source, records, rest=V1 + b'{"at":1785232801.0,"dropped":5}\n{"at":17')
    target = tmp_path / "it's.parquet"
    assert export([source], None, target) == 4
    assert list(read_ledger([target])) == list(read_ledger([source]))
    told = json.loads(to_json(summarise([source], by=["worker"])))
    again = json.loads(to_json(summarise([target], by=["worker"])))
    differ = {key for key in told if told[key] != again[key]}
    assert differ == {"files", "skipped", "skipped_lines"}
    assert again["dropped_records"] == 5
    with pytest.raises(EmptyLedger):
        export([source], START + 60, target)


def test_a_parquet_file_that_does_not_close_is_refused_by_row(tmp_path: Path) -> None:
    import duckdb

    target = tmp_path / "l.parquet"
    export([write_ledger(tmp_path / "l.jsonl", [FULL])], None, target)
    spoilt = tmp_path / "spoilt.parquet"
    duckdb.execute(f"COPY (SELECT * REPLACE (t_cold + 1 AS t_cold) FROM '{target}') TO '{spoilt}'")
    with pytest.raises(LedgerError, match=r"spoilt\.parquet:1: request r1: prompt does not close"):
        summarise([spoilt])


def test_the_page_about_the_ledger_is_what_the_code_says() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "ledger.md"
    text = page.read_text()
    assert update(text) == text, "run `make docs`"
    assert all(f"| `{code}` |" in text for code in CODES)
    keys = [field.encode_name for field in msgspec.structs.fields(LedgerLine)]
    assert all(f"| `{key}` |" in text for key in keys)


def test_a_record_holds_nothing_that_a_line_does_not() -> None:
    """Whatever is added to the record must get into the schema, or be left out on purpose."""
    told = {field.name for field in msgspec.structs.fields(LedgerLine)}
    renamed = {
        "request_id": "id",
        "client_id": "cid",
        "output_tokens": "out",
        "prompt_tokens": "prompt",
        "matched_tokens": "matched",
        "round_robin": "rr",
    }
    for name in RequestRecord.__struct_fields__:
        assert renamed.get(name, name) in told
