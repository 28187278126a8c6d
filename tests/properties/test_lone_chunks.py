"""Chunks that come alone do without the parser: whatever comes, the outcome is the same.

Each answer is played twice, cut into reads in the same way, as it is and with the short cut
switched off; what is taken and read, how it ends and whether the connection is kept must be equal.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate, pairwise

from chunkkit import Takes
from depth import DEPTH
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.upstream import UpstreamError
from gateway.wire.connection import Connection

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n"
END = b"0\r\n\r\n"
ENDS = [
    END,
    b"0\r\nX: y\r\n\r\n",
    b"0;a\r\n\r\n",
    b"",
    b"00\r\n\r\n",
    END + b"1\r\nx\r\n",
    END + HEAD,
]
FORMS = [b"%x\r\n%b\r\n"] * 6 + [
    *(b"0%x\r\n%b\r\n", b"%X\r\n%b\r\n", b"%x;a=b\r\n%b\r\n", b"%x \r\n%b\r\n"),
    *(b"0x%x\r\n%b\r\n", b"+%x\r\n%b\r\n", b"%x\n%b\r\n", b"%x\r\n%b\n", b"%x\r\n%b", b"\r\n%x%b"),
]
CONTENTS = [
    *(b"x", b"x" * 10, b"x" * 15, b"x" * 16, b"x" * 255, b"x" * 256, b"x" * 2048, b"x" * 2049),
    *(b"\r\n", b"a\r\n", b"0\r\n\r\n", b"1\r\nx\r\n", b"3\r\nabc\r\n\r\n", b"data: {}\n\n"),
]
SPLIT = [b"1", b"c\r\nabcdefghijkl\r\n", b"abcdefghijklmn\r\n"]
"""One chunk, whose middle looks like another."""


@st.composite
def answers(draw: st.DrawFn) -> list[bytes]:
    """Chunks as they come in: mostly one in a read, some joined or cut."""
    sizes = st.sampled_from([0, 0, 0, 0, 1, -1])
    forms = draw(st.lists(st.sampled_from(FORMS), max_size=6))
    contents = [draw(st.sampled_from(CONTENTS)) for _ in forms]
    parts = [
        form % (max(0, len(content) + draw(sizes)), content)
        for form, content in zip(forms, contents, strict=True)
    ]
    parts.append(draw(st.sampled_from(ENDS)))
    head = draw(st.sampled_from([HEAD, HEAD, HEAD, PLAIN]))
    ends = list(accumulate(len(part) for part in (head, *parts)))
    data = b"".join((head, *parts))
    cuts = set(ends) - set(draw(st.lists(st.sampled_from(ends))))
    cuts |= set(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    return [data[a:b] for a, b in pairwise(sorted({0, len(data), *cuts}))]


class Wire(asyncio.Transport):
    """Tells when it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = False

    def write(self, data: object) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self.cut = True


async def heard(
    reads: list[bytes], refused: int, burst: int = 1, *, alone: bool = True
) -> tuple[list[object], int]:
    """What a caller gets, and how many of the pieces came to it as chunks.

    :param refused: pieces of a multiple of so many bytes it does not take, but reads.
    :param burst: so many reads come before it has a turn.
    :param alone: chunks are taken without the parser.
    """
    told: list[object] = []

    def accepts(data: bytes) -> bool:
        if len(data) % refused:
            told.append(data)
        return len(data) % refused > 0

    taker = Takes(accepts, alone=alone)

    async def read() -> None:
        try:
            await one.head()
            while data := await one.read(taker):
                told.append((data,))
        except UpstreamError as error:
            told.append(type(error))

    wire, one = Wire(), Connection(asyncio.get_running_loop())
    one.connection_made(wire)
    one.begin(b"", b"", 60.0)
    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    for number, data in enumerate(reads):
        if not wire.cut:
            one.data_received(data)
        for _ in range(0 if number % burst else 2):
            await asyncio.sleep(0)
    for _ in range(4):
        await asyncio.sleep(0)
    if not reader.done():
        one.connection_lost(None)
    await reader
    return [*told, one.complete, one.end()], taker.chunks


@settings(max_examples=300 * DEPTH, deadline=None)
@given(answers(), st.sampled_from([1, 2, 5, 10_000]), st.sampled_from([1, 2, 3]))
@example([HEAD + b"3\r\nabc\r\n", *SPLIT, END], 10_000, 1)
@example([HEAD + b"3\r\nabc\r\n", b"0\r\n", b"1\r\nx\r\n", b"\r\n"], 10_000, 1)
@example([HEAD + b"1\r\na\r\n", b"1\r\nb\r\n1\r\nc\r\n", b"1\r\nd\r\n", END], 10_000, 3)
def test_lone_chunks_are_read_as_by_the_parser(
    reads: list[bytes], refused: int, burst: int
) -> None:
    short, _ = asyncio.run(heard(reads, refused, burst))
    parsed, chunks = asyncio.run(heard(reads, refused, burst, alone=False))
    assert not chunks
    assert short == parsed


async def test_a_lone_chunk_is_not_parsed() -> None:
    told, chunks = await heard([HEAD + b"1\r\na\r\n", *[b"1\r\nb\r\n"] * 3, END], 10_000)
    assert told == [b"a", b"b", b"b", b"b", True, True]
    assert chunks == 3
