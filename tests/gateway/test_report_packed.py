"""Ledger files whose packing broke off: what is whole of them counts, what is lost is told."""

from __future__ import annotations

import gzip
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from ledgerkit import hit, record, write_ledger

from gateway.ledgerline import encode_record
from gateway.records import TokenFlow
from gateway.report import LedgerError, read_ledger, summarise
from gateway.report.find import find
from gateway.report.text import notes_of

PACKED_RECORDS = 3000


def packed_ledger() -> bytes:
    """Two members, as files that were joined have."""
    lines = [
        encode_record(record(flow=hit(1, 0), request_id=f"{at * 7919:x}"))
        for at in range(PACKED_RECORDS)
    ]
    half = len(lines) // 2
    return gzip.compress(b"".join(lines[:half])) + gzip.compress(b"".join(lines[half:]))


@pytest.mark.parametrize("lost", ["trailer", "little", "half", "most", "head", "all", "spoilt"])
def test_a_packed_file_that_breaks_off_gives_what_is_whole(tmp_path: Path, lost: str) -> None:
    data = packed_ledger()
    keeps = {"trailer": -5, "little": -300, "half": len(data) // 2, "most": 2000, "head": 6}
    cut = data[: keeps[lost]] if lost in keeps else b""
    if lost == "spoilt":
        cut = data[:-4000] + b"\xff" * 4000
    write_ledger(tmp_path / "a.jsonl", [record(flow=hit(5, 0))])
    file = tmp_path / "b.jsonl.gz"
    file.write_bytes(cut)
    engine, whole = zlib.decompressobj(31), b""
    with suppress(zlib.error):
        for at in range(len(cut)):  # the members one after the other, as far as each goes
            whole += engine.decompress(cut[at : at + 1])
            if engine.eof:
                engine = zlib.decompressobj(31)
    expected = whole.count(b"\n")
    report = summarise([tmp_path])
    assert report.totals["requests"] == expected + 1
    assert report.totals["prompt"] == expected + 5
    assert report.skipped_lines == 1
    assert (report.skipped[0].file, report.skipped[0].line) == (str(file), expected + 1)
    assert f"{file} breaks off at line {expected + 1}: what else was in it is lost." in (
        "\n".join(notes_of(report))
    )
    assert len(list(read_ledger([file]))) == expected
    if expected:
        (found,) = find([tmp_path], f"{expected // 2 * 7919:x}")
        assert found.flow.prompt == 1


def test_torn_lines_are_counted_beside_packed_files_that_break_off(tmp_path: Path) -> None:
    write_ledger(tmp_path / "a.jsonl", [record()], rest=b'{"at":1,"id":"cut\n' * 9)
    (tmp_path / "b.jsonl.gz").write_bytes(packed_ledger()[:-5])
    report = summarise([tmp_path])
    assert report.skipped_lines == 10
    assert report.totals["requests"] == PACKED_RECORDS + 1
    assert "b.jsonl.gz breaks off" in "\n".join(notes_of(report))
    bad = record(request_id="the-bad-one", flow=TokenFlow(prompt=10, cold=9))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(encode_record(bad) * 2)[:-5])
    with pytest.raises(LedgerError, match=r"b\.jsonl\.gz:1: request the-bad-one"):
        summarise([tmp_path])
