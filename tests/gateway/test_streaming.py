"""The stream tap, without sockets: any chunking, same bytes; what is held, dropped, added."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import DONE, ROLE, STOP, chat, delta, event, usage, usage_event

from gateway.streaming import StreamTap
from shared.openai import RouteKind, parse


def tap(kind: RouteKind = RouteKind.CHAT, **fields: Any) -> StreamTap:
    body = chat(stream=True, **fields)
    if kind is RouteKind.COMPLETIONS:
        body["prompt"] = body.pop("messages")[0]["content"]
    return StreamTap(parse(kind, json.dumps({**body, **fields}).encode()))


FULL = ROLE + b": ping\n\n" + delta("你好🌍") + b"data: {x\n\n" + delta("é") + STOP
FULL += usage_event() + DONE + delta("late")
SHOWN = ROLE + delta("你好🌍") + delta("é") + STOP + DONE


@given(st.lists(st.integers(0, len(FULL)), max_size=12))
def test_any_chunking_gives_the_same_bytes(cuts: list[int]) -> None:
    reader = tap()
    out = b""
    edges = [0, *sorted(cuts), len(FULL)]
    for at, (start, end) in enumerate(pairwise(edges)):
        out += reader.feed(FULL[start:end], float(at))
    assert out + reader.end(99.0) == SHOWN
    assert (reader.done, reader.complete, reader.malformed) == (True, True, 1)
    assert reader.content_events == 2
    assert reader.usage is not None
    assert reader.usage.cached == 4


def test_nothing_goes_out_before_content() -> None:
    reader = tap()
    assert reader.feed(b": ping\n\n" + ROLE, 1.0) == b""
    assert not reader.started
    assert reader.feed(delta("") + delta(None), 2.0) == b""
    assert reader.feed(delta("a"), 3.0) == ROLE + delta("") + delta(None) + delta("a")
    assert reader.first_at == 3.0
    assert reader.feed(b": ping\n\n", 4.0) == b": ping\n\n"


@pytest.mark.parametrize(
    "more", [{"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}, {"refusal": "no"}]
)
def test_content_is_more_than_text(more: dict[str, Any]) -> None:
    reader = tap()
    assert reader.feed(delta(None, **more), 1.0) != b""
    assert reader.content_events == 1


def test_times_between_contents() -> None:
    reader = tap()
    for at in (1.0, 2.0, 4.0):
        reader.feed(delta("a"), at)
    assert (reader.first_at, reader.itl_s) == (1.0, 1.5)


def test_an_error_event_ends_it() -> None:
    reader = tap()
    reader.feed(delta("a"), 1.0)
    assert reader.feed(event({"error": {"message": "boom"}}) + delta("b") + DONE, 2.0) == b""
    assert reader.error == {"message": "boom"}
    assert (reader.done, reader.complete) == (False, False)


@pytest.mark.parametrize(
    "raw", [b'event: error\ndata: {"message": "x"}\n\n', b'data: {"error": "x"}\n\n']
)
def test_other_forms_of_errors(raw: bytes) -> None:
    reader = tap()
    reader.feed(raw, 1.0)
    assert reader.error is not None
    assert "x" in str(reader.error["message"])
    assert not reader.started


def test_a_stream_is_complete_when_all_choices_have_ended() -> None:
    reader = tap(n=2)
    reader.feed(delta("a") + delta("b", index=1) + delta(finish="stop"), 1.0)
    assert not reader.complete
    assert reader.end(2.0) == b""
    reader = tap(n=2)
    reader.feed(delta("a", finish="stop") + delta(finish="length", index=1), 1.0)
    assert reader.complete
    assert reader.end(2.0) == DONE


def test_prompts_count_as_choices() -> None:
    reader = tap(RouteKind.COMPLETIONS, prompt=["x", "y"])
    text = event({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})
    assert reader.feed(text, 1.0) == text
    assert not reader.complete


def test_half_an_event_at_the_end_is_dropped() -> None:
    reader = tap()
    reader.feed(delta("a") + delta("b")[:-9], 1.0)
    assert reader.end(2.0) == b""
    assert not reader.complete


def test_an_end_mark_without_its_blank_line_counts() -> None:
    reader = tap()
    reader.feed(delta("a") + STOP + b"data: [DONE]", 1.0)
    assert reader.end(2.0) == DONE
    assert reader.done


def test_stripping_usage_keeps_the_rest_as_it_was() -> None:
    reader = tap()
    raw = b'data: {"z": 123456789012345678901234567890, "usage": {"prompt_tokens": 1}, '
    raw += b'"choices": [ {"index":0,"delta":{"content":"a"}} ], "f": 1.50}\n\n'
    out = reader.feed(raw, 1.0)
    assert b"123456789012345678901234567890" in out
    assert b"1.50" in out
    assert b"usage" not in out
    assert list(json.loads(out[6:])) == ["z", "choices", "f"]


def test_running_usage_passes_for_who_asked_for_it() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    reader = tap(stream_options=options)
    one = event({"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": usage()})
    assert reader.feed(one + usage_event() + DONE, 1.0) == one + usage_event() + DONE
    assert reader.usage is not None


ODD = [
    delta("a"),
    delta(""),
    delta(None),
    delta("b", reasoning_content="hm"),
    STOP,
    ROLE,
    usage_event(),
    event({"choices": []}),
    event({"choices": None}),
    event({"choices": [{"index": "0", "delta": {"content": "x"}}]}),
    event({"choices": [{"delta": {"content": "x"}, "finish_reason": 3}]}),
    event({"choices": [{"index": 1, "delta": {"content": "x"}, "finish_reason": "stop"}]}),
    event({"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": usage()}),
    event({"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": None}),
    event({"choices": [{"index": 0, "delta": {"content": "x"}}], "error": "no"}),
    event({"object": "error", "message": "no"}),
    b'data: {"choices":[{"index":0,"delta":{"content":NaN}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}\n\n',
    b"data: {x}\n\n",
    b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"two lines"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"cr"}}]}\r\n\r\n',
    b": {}\n\n",
    DONE,
]


@given(st.lists(st.sampled_from(ODD), max_size=12), st.sampled_from(list(RouteKind)))
def test_whole_events_and_pieces_of_them_are_read_alike(
    events: list[bytes], kind: RouteKind
) -> None:
    whole, pieces = tap(kind), tap(kind)
    for number, raw in enumerate([delta("start"), *events]):
        now = float(number)
        out = whole.feed(raw, now)
        split = pieces.feed(raw[:7], now) + pieces.feed(raw[7:], now)
        if not raw.endswith(b"\r\n"):  # may be half of a longer line end
            assert out == split
    for name in ("started", "done", "error", "usage", "content_events", "malformed", "complete"):
        assert getattr(whole, name) == getattr(pieces, name), name
    assert whole.end(99.0) == pieces.end(99.0)


@pytest.mark.parametrize("where", ["content", "a field", "a comment", "the name"])
@pytest.mark.parametrize("started", [True, False])
def test_bytes_that_are_no_text_do_not_reach_clients(where: str, started: bool) -> None:
    """Clients decode strictly and would end with an exception in the middle of an answer."""
    event = {
        "content": b'data: {"choices":[{"index":0,"delta":{"content":"a\xffb"}}]}\n\n',
        "a field": b'data: {"id":"\xc3","choices":[{"index":0,"delta":{"content":"ab"}}]}\n\n',
        "a comment": b': \xe4\xbd\n\ndata: {"choices":[{"index":0,"delta":{"content":"ab"}}]}\n\n',
        "the name": b'event: \x80\ndata: {"choices":[{"index":0,"delta":{"content":"ab"}}]}\n\n',
    }[where]
    reader = tap()
    out = reader.feed(delta("first"), 1.0) if started else b""
    out += reader.feed(event, 2.0) + reader.feed(STOP + DONE, 3.0)
    lines = out.decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(texts) == ("first" if started else "") + (
        "a\ufffdb" if where == "content" else "ab"
    )
    assert reader.malformed == 0
