"""Events that are known from one before: every stream is read as if each had been decoded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rig import DONE, ROLE, STOP, chat, delta

from gateway.metevents import meet, read_chunk
from gateway.streaming import StreamTap
from gateway.wire.chunks import content_of
from shared.openai import RouteKind, parse

TEXTS = ("a", "b", " word", "", "word1", 'quo"te', "back\\slash", "é", "new\nline", "[DONE]", "}]}")
EVENT = (
    b'data: {"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,'
    b'"delta":{"content":"%b"},"logprobs":null,"finish_reason":null}]}\n\n'
)


def tap(*, met: bool, kind: RouteKind = RouteKind.CHAT) -> StreamTap:
    body: dict[str, Any] = chat(stream=True)
    if kind is RouteKind.COMPLETIONS:
        body["prompt"] = body.pop("messages")[0]["content"]
    made = StreamTap(parse(kind, json.dumps(body).encode()))
    if not met:
        made._meetings = 0
    return made


def seen(reader: StreamTap) -> tuple[Any, ...]:
    return (
        *(reader.started, reader.over, reader.complete, reader.error, reader.usage),
        *(reader.content_events, reader.malformed, reader.first_at, reader.itl_s),
    )


def same(events: list[bytes], kind: RouteKind = RouteKind.CHAT) -> None:
    plain, short = tap(met=False, kind=kind), tap(met=True, kind=kind)
    chunked = tap(met=True, kind=kind)
    for at, data in enumerate(events):
        if not chunked.take_chunk(as_chunk(data), float(at)):
            chunked.take_usual(data, float(at))
        chunked.feed(data, float(at))
        assert plain.take_usual(data, float(at)) == short.take_usual(data, float(at)), data
        assert plain.feed(data, float(at)) == short.feed(data, float(at)), data
        assert seen(plain) == seen(short) == seen(chunked), data
    assert plain.end(99.0) == short.end(99.0)
    chunked.end(99.0)
    assert seen(plain) == seen(short) == seen(chunked)


def as_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


RAW = st.sampled_from([EVENT % text.encode() for text in ("a", "b", "longer text", "a b", "")])
NASTY = st.sampled_from(
    [
        *(EVENT % raw for raw in (b'x"y', b"x\\ny", b"\\", b"\xff", b"\xc3\xa9", b"\r")),
        *(EVENT % raw for raw in (b"a\n\nb", b'","z":"', b"\x00")),
        EVENT.replace(b"null}]", b'"stop"}]') % b"a",
        EVENT.replace(b'"c1"', b'"a"') % b"a",
        EVENT.replace(b'"logprobs":null', b'"logprobs":"a"') % b"a",
        EVENT.replace(b'"index":0', b'"index":1') % b"a",
        (EVENT % b"a").replace(b"\n\n", b"\n"),
        (EVENT % b"a") * 2,
        (EVENT % b"a")[:-20],
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n',
        ROLE, STOP, DONE, b": ping\n\n", b"data: {x\n\n",
    ]
)  # fmt: skip


@given(st.lists(RAW | NASTY | st.sampled_from([delta(text) for text in TEXTS]), max_size=25))
def test_a_stream_is_read_as_if_each_event_had_been_decoded(events: list[bytes]) -> None:
    same([EVENT % b"first", *events])


@given(st.lists(st.sampled_from(TEXTS) | st.text(max_size=5), max_size=20), st.booleans())
def test_texts_of_completions(texts: list[str], spaces: bool) -> None:
    form = (", ", ": ") if spaces else (",", ":")
    chunks = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
    events = [f"data: {json.dumps(chunk, separators=form)}\n\n".encode() for chunk in chunks]
    same(events, RouteKind.COMPLETIONS)


@given(st.binary(max_size=6), st.integers(0, len(EVENT % b"a")), st.integers(0, 6))
def test_bytes_that_are_spoilt_are_looked_at(more: bytes, at: int, less: int) -> None:
    whole = EVENT % b"a"
    same([EVENT % b"first", EVENT % b"b", whole[:at] + more + whole[at + less :], whole])


@given(st.binary(max_size=6), st.integers(0, 170), st.integers(0, 6), st.integers(1, 150))
@example(b"0", 0, 0, 1)  # a size with a zero in front
@example(b"\r\n", 170, 0, 1)  # more than the chunk
@example(b"", 0, 1, 90)  # a digit is missing
def test_a_chunk_is_whole_and_in_its_shortest_form(
    more: bytes, at: int, less: int, size: int
) -> None:
    known = kept(EVENT % b"word")
    chunk = as_chunk(EVENT % (b"x" * size))
    assert known.again_in_chunk(chunk)
    spoilt = chunk[:at] + more + chunk[at + less :]
    if known.again_in_chunk(spoilt):
        content = content_of(spoilt)
        assert spoilt == as_chunk(content)
        assert known.again(content)


def test_chunks_of_many_lengths_are_known_again() -> None:
    known = kept(EVENT % b"word")
    for size in (*range(3000), *range(1, 200)):
        content = EVENT % (b"x" * size)
        assert known.again_in_chunk(as_chunk(content)) == (size > 0 and len(content) <= 2048)


def kept(event: bytes) -> Any:
    chunk = read_chunk(event)
    assert chunk is not None
    return meet(event, chunk, chat=True)


def test_a_usual_stream_takes_the_short_cut() -> None:
    known = kept(EVENT % b"word")
    assert known is not None
    assert known.again(EVENT % b"another one, longer")
    assert known.again(EVENT % b"x")
    for odd in (b"", b'"', b"\\u0041", b"\n", b"\xc3\xa9", b"\x7f", b"\x00"):
        assert not known.again(EVENT % odd)


@pytest.mark.parametrize(
    "event",
    [
        EVENT.replace(b'"c1"', b'"word"') % b"word",  # twice there
        EVENT.replace(b'"c1"', b'"word"') % b"\\u0077ord",  # there, but as something else
        EVENT % b"",
        EVENT % b"w\\nd",
        EVENT % b"\xc3\xa9",
        EVENT.replace(b"null}]", b'"stop"}]') % b"word",
        EVENT.replace(b"}]}", b'},{"index":1,"delta":{"content":"b"}}]}') % b"word",
    ],
)
def test_what_is_not_kept(event: bytes) -> None:
    assert kept(event) is None
