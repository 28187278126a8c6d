"""Any chunking of the same bytes gives the same events, and loses no byte."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.sse import SseEvent, SseEventTooLarge, SseParser

EOL = st.sampled_from(["\n", "\r\n", "\r"])
LINE = st.sampled_from(
    [
        "data: x",
        "data:",
        "data",
        "data: 你好🌍",
        ": c",
        "event: e",
        "id: 1",
        "retry: 5",
        "",
        "",
        "",
        "junk",
    ]
)
STREAM = st.lists(st.tuples(LINE, EOL), max_size=20).map(
    lambda lines: "".join(line + end for line, end in lines).encode()
) | st.binary(max_size=30)
PREFIX = st.sampled_from([b"", b"\xef\xbb\xbf", b"\xef\xbb"])


def events_of(parser: SseParser, chunks: list[bytes]) -> list[SseEvent | str]:
    """Events, and at the end a mark if the parser gave up."""
    found: list[SseEvent | str] = []
    try:
        for chunk in chunks:
            found += parser.feed(chunk)
        found += parser.finish()
    except SseEventTooLarge:
        found.append("too large")
    return found


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(at)]


PLACES = st.lists(st.integers(0, 1000), max_size=12)


@given(PREFIX, STREAM, PLACES)
def test_chunking_does_not_matter(prefix: bytes, stream: bytes, places: list[int]) -> None:
    data = prefix + stream
    whole = events_of(SseParser(), [data])
    assert events_of(SseParser(), cut(data, places)) == whole
    assert events_of(SseParser(), [data[i : i + 1] for i in range(len(data))]) == whole
    assert b"".join(e.raw for e in whole if isinstance(e, SseEvent)) == data
    assert all(e.complete for e in whole[:-1] if isinstance(e, SseEvent))


@given(STREAM, PLACES, st.integers(1, 20))
def test_chunking_does_not_matter_with_a_cap(stream: bytes, places: list[int], cap: int) -> None:
    assert events_of(SseParser(cap), cut(stream, places)) == events_of(SseParser(cap), [stream])
