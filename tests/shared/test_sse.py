"""Odd but legal event streams (case A18)."""

from __future__ import annotations

import pytest

from shared.sse import DONE, SseEvent, SseEventTooLarge, SseParser, encode


def parse(data: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [*parser.feed(data), *parser.finish()]


@pytest.mark.parametrize(
    ("raw", "data", "event", "retry"),
    [
        (b"data: x\n\n", "x", None, None),
        (b"data:x\n\n", "x", None, None),
        (b"data:  x\n\n", " x", None, None),
        (b"data: x\r\n\r\n", "x", None, None),
        (b"data\n\n", "", None, None),
        (b"data: \n\n", "", None, None),
        (b"retry: 3000\n\n", None, None, 3000),
        (b"retry: soon\n\n", None, None, None),
        (b'event: message\ndata:{"a":1}\n\n', '{"a":1}', "message", None),
        (b'data: {"a":\ndata: 1}\n\n', '{"a":\n1}', None, None),
        (b"data: a: b\n\n", "a: b", None, None),
        (b"datum: a\n\n", None, None, None),
        (b": data: a\n\n", None, None, None),
        (b"\xef\xbb\xbfdata: x\n\n", "x", None, None),
        ("data: 你好🌍\n\n".encode(), "你好🌍", None, None),
        (b"data: \xff\n\n", "\ufffd", None, None),
    ],
)
def test_one_event(raw: bytes, data: str | None, event: str | None, retry: int | None) -> None:
    assert parse(raw) == [SseEvent(data, raw, event, None, retry)]


def test_comments_and_blank_lines_are_marked_and_kept() -> None:
    events = parse(b": ping\r\n\r\n\n\ndata: a\n\n: x\n\n")
    assert [e.comment_only for e in events] == [True, True, True, False, True]
    assert b"".join(e.raw for e in events) == b": ping\r\n\r\n\n\ndata: a\n\n: x\n\n"


def test_a_retry_event_is_not_comment_only() -> None:
    assert not parse(b"retry: 1\n\n")[0].comment_only


def test_the_id_field() -> None:
    assert [e.id for e in parse(b"id: 7\ndata: a\n\nid: 1\x002\ndata: b\n\nid\n\n")] == [
        "7",
        None,
        "",
    ]


def test_lone_carriage_returns_end_lines() -> None:
    assert [(e.data, e.complete) for e in parse(b"data: a\rdata: b\r\rdata: c\r\r")] == [
        ("a\nb", True),
        ("c", True),
    ]


def test_only_the_first_bom_counts() -> None:
    assert [e.data for e in parse(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n")] == ["a", None]


def test_what_lacks_its_blank_line_is_incomplete() -> None:
    parser = SseParser()
    assert parser.feed(b'data: {"a"') == []
    assert parser.finish() == [SseEvent('{"a"', b'data: {"a"', complete=False)]
    assert parser.finish() == []


def test_an_event_is_delivered_with_its_last_byte() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert [e.data for e in parser.feed(b"\n")] == ["a"]
    assert parser.feed(b"data: b\r\n\r") == []
    assert [e.data for e in parser.feed(b"\n")] == ["b"]


def test_the_cap_on_one_event() -> None:
    SseParser(16).feed(b"data: 89012345\n\n")
    with pytest.raises(SseEventTooLarge):
        SseParser(16).feed(b"data: 890123456\n\n")
    with pytest.raises(SseEventTooLarge):
        SseParser(16).feed(b"data: 89012345678")


def test_events_before_an_oversized_one_are_delivered_first() -> None:
    parser = SseParser(16)
    assert [e.data for e in parser.feed(b"data: a\n\ndata: " + b"x" * 20)] == ["a"]
    with pytest.raises(SseEventTooLarge):
        parser.feed(b"")
    with pytest.raises(SseEventTooLarge):
        parser.finish()


def test_a_large_event_in_small_chunks_takes_linear_time() -> None:
    parser, chunk = SseParser(), b"x" * 64
    assert parser.feed(b"data: ") == []
    for _ in range(100_000):
        assert parser.feed(chunk) == []
    (event,) = parser.feed(b"\n\n")
    assert event.data is not None
    assert len(event.data) == 6_400_000


@pytest.mark.parametrize("data", ["", "x", "a\nb", "a\r\nb\rc", "\n", "你好", '{"a": 1}'])
def test_encoded_data_is_parsed_back(data: str) -> None:
    (event,) = parse(encode(data))
    assert event.data == data.replace("\r\n", "\n").replace("\r", "\n")
    assert encode(data.encode()) == encode(data)


def test_the_end_marker() -> None:
    assert DONE == b"data: [DONE]\n\n"
