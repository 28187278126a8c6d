"""Asking for usage changes one value and no other byte (case A05)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stepkit import calls

from shared.errors import BadRequest
from shared.jsonsplice import MAX_MEMBERS, NotAnObject, apply, members, set_member
from shared.openai import usage_edits, with_usage

TEXT = st.text(max_size=8) | st.sampled_from(
    ['"', "\\", "}{][", '\\"', "stream_options", "é🌍", "\u2028"]
)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)
OPTIONS = SCALAR | st.dictionaries(TEXT | st.just("include_usage"), VALUE, max_size=3)
SPACE = st.text(" \t\r\n", max_size=2)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON objects with odd spacing, escapes, duplicates and stream_options of any kind."""
    pairs = draw(st.lists(st.tuples(TEXT, VALUE), max_size=4))
    pairs += [("stream_options", value) for value in draw(st.lists(OPTIONS, max_size=2))]
    ascii_only = draw(st.booleans())
    pieces = []
    for key, value in draw(st.permutations(pairs)):
        name = json.dumps(key, ensure_ascii=ascii_only)
        if draw(st.booleans()):
            name = name.replace("s", "\\u0073")
        text = json.dumps(value, ensure_ascii=ascii_only, indent=draw(st.sampled_from([None, 1])))
        a, b, c, d = (draw(SPACE) for _ in range(4))
        pieces.append(f"{a}{name}{b}:{c}{text}{d}")
    start, end = draw(SPACE), draw(SPACE)
    inside = ",".join(pieces) or draw(SPACE)
    return f"{start}{{{inside}}}{end}".encode("utf-8", "surrogatepass")


@given(bodies())
@example(b"{}")
@example(b'{"stream_options":{"include_usage":false,"include_usage":null}}')
@example(b'{"stream_options":null,"stream_options":{"a":[1,{"stream_options":2}]}}')
def test_only_the_wish_for_usage_changes(raw: bytes) -> None:
    before, after = json.loads(raw), json.loads(with_usage(raw))
    options = before.get("stream_options")
    wished: dict[str, Any] = options if isinstance(options, dict) else {}
    assert after == {**before, "stream_options": {**wished, "include_usage": True}}


@given(bodies())
def test_without_the_splices_the_bytes_are_the_same(raw: bytes) -> None:
    spliced, undone, shift = with_usage(raw), b"", 0
    position = 0
    for edit in sorted(usage_edits(raw), key=lambda e: e.start):
        start = edit.start + shift
        assert spliced[start : start + len(edit.text)] == edit.text
        undone += spliced[position:start] + raw[edit.start : edit.end]
        position = start + len(edit.text)
        shift += len(edit.text) - (edit.end - edit.start)
    assert undone + spliced[position:] == raw


@given(bodies())
def test_asking_twice_is_asking_once(raw: bytes) -> None:
    assert with_usage(with_usage(raw)) == with_usage(raw)


def test_members_are_found_in_order_with_their_bytes() -> None:
    raw = b' { "a" : [1, "]"] , "b\\"":"x\\\\", "c":-1.5e3,"a":{"d":{}} } '
    found = [(m.key, raw[m.start : m.end]) for m in members(raw)]
    assert found == [
        ("a", b'[1, "]"]'), ('b"', b'"x\\\\"'), ("c", b"-1.5e3"), ("a", b'{"d":{}}')
    ]  # fmt: skip


def test_setting_a_member_changes_every_duplicate() -> None:
    raw = b'{"m":"a","n":1,"m":"b"}'
    assert apply(raw, set_member(raw, "m", b'"z"')) == b'{"m":"z","n":1,"m":"z"}'
    assert apply(raw, set_member(raw, "k", b"0")) == b'{"k":0,"m":"a","n":1,"m":"b"}'


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'"x"', b"{", b'{"a"}', b'{"a":}', b'{"a":1', b'{"a":[}']
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(NotAnObject):
        list(members(raw))


QUOTED = 10
"""Calls that a quote inside a string may cost."""


@pytest.mark.parametrize("piece", [b"x\\n", b"\\\\", b'\\"', b"\\u0022", b"{[", b"1"])
def test_a_long_prompt_costs_little(piece: bytes) -> None:
    text = piece * 300_000
    raw = b'{"messages":[{"content":"' + text + b'"},[' + b"1," * 9 + b'2]],"stream_options":null}'
    assert with_usage(raw) == raw.replace(b"null", b'{"include_usage":true}')
    assert calls(lambda: with_usage(raw)) < 1000 + QUOTED * raw.count(b'\\"')


@pytest.mark.parametrize("pairs", [0, 1, 7, 8, 9, 70, 600])
def test_a_quote_after_many_backslashes(pairs: int) -> None:
    value = b'"' + b"\\\\" * pairs + b'\\"' + b"\\\\" * pairs + b'"'
    raw = b'{"a":' + value + b',"b":1}'
    assert [raw[m.start : m.end] for m in members(raw)] == [value, b"1"]


@pytest.mark.parametrize(
    "element", [b'{"role":"user","content":""}', b'"a"', b'"\\"\\u0041"', b"[]", b"{}", b"1.5e3"]
)
def test_many_small_values_cost_little(element: bytes) -> None:
    raw = b'{"x":[' + (element + b",") * 50_000 + element + b'],"stream_options":null}'
    assert with_usage(raw) == raw.replace(b"null", b'{"include_usage":true}')
    assert calls(lambda: with_usage(raw)) < 1000, "the loop is not Python's"


def test_numbers_of_any_length_and_deep_values_are_passed_over() -> None:
    deep = b"[" * 20_000 + b"]" * 20_000
    raw = b'{"n":[' + b"9" * 10_000 + b',1e999],"d":' + deep + b',"s":["\xc3\xa9"],"k":1}'
    found = {m.key: raw[m.start : m.end] for m in members(raw)}
    assert (found["d"], found["s"], found["k"]) == (deep, b'["\xc3\xa9"]', b"1")


def test_an_object_of_too_many_members_is_refused() -> None:
    raw = b"{" + b'"a":1,' * MAX_MEMBERS + b'"stream_options":null}'
    with pytest.raises(BadRequest, match="members"):
        with_usage(raw)
    few = raw.replace(b'"a":1,', b"", 1)
    assert with_usage(few) == few.replace(b"null", b'{"include_usage":true}')
