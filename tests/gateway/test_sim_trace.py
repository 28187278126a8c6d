"""Traces: what is read from the lines, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from simkit import chats, encoded, row, write

from gateway.sim.files import block_size_of, load_trace
from gateway.sim.trace import TraceError, read_trace, spread


def test_only_full_blocks_are_a_path_and_equal_prefixes_have_equal_numbers() -> None:
    rows = [row(0, 40, 3, [7, 8, 9]), row(10, 47, 3, [7, 8, 4]), row(20, 32, 3, [8, 7])]
    trace = read_trace(encoded(rows), 16)
    paths = [request.path for request in trace.requests]
    assert paths == [(0, 1), (0, 1), (2, 3)], "an id means a block only below its parent"
    assert trace.sessions is None
    assert all(request.first and request.following is None for request in trace.requests)


def test_turns_of_a_session_follow_each_other_and_tell_the_answers_blocks() -> None:
    rows = [
        row(0, 20, 30, [1, 2], session_id="a"),
        row(100, 16, 5, [9], session_id="b"),
        row(2000, 70, 5, [1, 3, 4, 5, 6], session_id="a"),
    ]
    trace = read_trace(encoded(rows), 16)
    first, other, second = trace.requests
    assert (first.following, other.following, second.following) == (2, None, None)
    assert (first.first, other.first, second.first) == (True, True, False)
    assert second.think_s == pytest.approx(2.0 - 30 * 0.02)
    assert first.answer == second.path[1:3], "50 tokens are three full blocks, one of them asked"
    assert second.answer == ()
    assert trace.sessions == 2


def test_a_changed_history_tells_nothing_of_the_answer() -> None:
    rows = [row(0, 32, 90, [1, 2], session_id=1), row(9, 48, 1, [1, 7, 8], session_id=1)]
    assert read_trace(encoded(rows), 16).requests[0].answer == ()


def test_one_ticks_requests_are_spread_over_the_time_to_the_next() -> None:
    assert spread([0.0, 0.0, 3.0, 3.0, 3.0]) == [0.0, 1.5, 3.0, 4.0, 5.0]
    assert spread([5.0, 5.0]) == [5.0, 5.0]
    assert spread([1.0, 2.0, 4.0]) == [1.0, 2.0, 4.0]


def test_what_a_trace_adds_up_to() -> None:
    trace = read_trace(encoded(chats(sessions=2, turns=2)), 16)
    assert trace.input_tokens == 2 * (85 + 133)
    assert trace.output_tokens == 4 * 40
    assert trace.span_s == pytest.approx(0.15)
    assert trace.most_blocks == 11


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([b"{}\n"], "line 1 is no request of a trace: Object missing required field `timestamp`"),
        ([b"\xff\xfe"], "line 1 is no request of a trace"),
        ([b"\n", b"[1]"], "line 2 is no request of a trace"),
        (encoded([row(0, 40, 1, [1])]), "line 1: 1 hash_ids for 40 tokens"),
        (encoded([row(0, 20, 1, [1, 2, 3])]), "line 1: 3 hash_ids for 20 tokens"),
        (encoded([row(0, -1, 1, [])]), "line 1: a length below 0"),
        (encoded([row(5, 1, 1, []), row(4, 1, 1, [])]), "line 2: its timestamp lies before"),
        (encoded([row(0, 1, 1, []), row(4, 1, 1, [], session_id=1)]), "line 2: some requests have"),
        ([], "there is no request in it"),
    ],
)
def test_a_line_at_fault_is_named(lines: list[bytes], fault: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(lines, 16)
    assert str(caught.value).startswith(fault)


def test_files_may_be_packed_and_tell_their_block_size(tmp_path: Path) -> None:
    rows = chats()
    for name in ("t.b16.jsonl", "t.b16.jsonl.gz"):
        path = write(tmp_path / name, rows)
        assert block_size_of(path) == 16
        assert load_trace(path, 16) == read_trace(encoded(rows), 16)
        assert len(load_trace(path, 16, limit=3).requests) == 3
    assert block_size_of(tmp_path / "blocks.jsonl") is None


@pytest.mark.parametrize("spoil", ["missing", "empty folder", "torn", "mangled"])
def test_what_cannot_be_read_is_a_trace_error(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "t.b16.jsonl.gz"
    packed = gzip.compress(b"".join(encoded(chats())))
    if spoil == "empty folder":
        path.mkdir()
    elif spoil == "torn":
        path.write_bytes(packed[:60])
    elif spoil == "mangled":
        path.write_bytes(packed[:30] + b"\0" * 20 + packed[50:])
    with pytest.raises(TraceError, match=r"cannot be read|no trace file in it"):
        load_trace(path, 16)
