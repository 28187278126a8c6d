"""A18: odd but legal event streams from workers reach every client in the usual form."""

from __future__ import annotations

import json
import random
import re

import pytest
from caserig import COMPLETIONS, body_for, contents, read_stream
from rig import CHAT, DONE, STOP, ask, chat, delta, raw_stream

A = b'{"choices":[{"index":0,"delta":{"content":"a"}}]}'
B_HEAD, B_TAIL = b'{"choices":[{"index":0,', b'"delta":{"content":"b"}}]}'
C = b'{"choices":[{"index":0,"delta":{"content":"c"},"finish_reason":"stop"}]}'

CASE = [
    b": ping\r\n\r\n",
    b"retry: 3000\n\n",
    b"event: message\ndata:" + A + b"\n\n",
    b"data: " + B_HEAD + b"\ndata: " + B_TAIL + b"\n\n",
    b"data: " + C + b"\r\n\r\n",
    b"data: [DONE]\r\n\r\n",
]
ABC = [b"data: " + each for each in (A, B_HEAD + B_TAIL, C, b"[DONE]")]
STREAMS: dict[str, list[bytes]] = {
    "as in the case": CASE,
    "CRLF everywhere": [each + b"\r\n\r\n" for each in ABC],
    "CR everywhere": [each + b"\r\r" for each in ABC],
    "mixed ends": [ABC[0] + b"\r\n\n", ABC[1] + b"\n\r\n", ABC[2] + b"\r\r\n", ABC[3] + b"\n\r"],
    "byte order mark": [b"\xef\xbb\xbf" + ABC[0] + b"\n\n", *(e + b"\n\n" for e in ABC[1:])],
    "no spaces": [each.replace(b"data: ", b"data:") + b"\n\n" for each in ABC],
    "two spaces": [each.replace(b"data: ", b"data:  ") + b"\n\n" for each in ABC],
    "ids": [b"id: %d\n" % n + each + b"\n\n" for n, each in enumerate(ABC)],
    "ids behind": [each + b"\nid: %d\n\n" % n for n, each in enumerate(ABC)],
    "comments within": [b": x\n" + each + b"\n: y\n\n" for each in ABC],
    "unknown fields": [b"foo: bar\nbare\n" + each + b"\n\n" for each in ABC],
    "blank lines between": [b"\n\n" + each + b"\n\n\n\n" for each in ABC],
    "empty data between": [each + b"\n\ndata:\n\ndata\n\ndata: \n\n" for each in ABC[:3]]
    + [ABC[3] + b"\n\n"],
    "event without data": [b"event: message\n\n" + each + b"\n\n" for each in ABC],
    "event names": [b"event: chunk\n" + each + b"\n\n" for each in ABC],
    "three data lines": [
        b"data: {\ndata: " + each[7:-1] + b"\ndata: }\n\n" if each != ABC[3] else each + b"\n\n"
        for each in ABC
    ],
    "pretty printed": [
        b"".join(
            b"data: " + line.encode() + b"\n"
            for line in json.dumps(json.loads(each[6:]), indent=2).splitlines()
        )
        + b"\n"
        for each in ABC[:3]
    ]
    + [ABC[3] + b"\n\n"],
    "no blank line at the end": [*(each + b"\n\n" for each in ABC[:3]), ABC[3]],
    "one line end at the end": [*(each + b"\n\n" for each in ABC[:3]), ABC[3] + b"\n"],
    "no end mark": [each + b"\n\n" for each in ABC[:3]],
    "last content without blank line": [*(each + b"\n\n" for each in ABC[:2]), ABC[2]],
    "end mark with spaces": [*(each + b"\n\n" for each in ABC[:3]), b"data:   [DONE]  \n\n"],
    "broken JSON between": [each + b"\n\ndata: {broken\n\n" for each in ABC[:3]]
    + [ABC[3] + b"\n\n"],
    "JSON that is no object": [
        each + b"\n\ndata: 7\n\ndata: []\n\ndata: null\n\n" for each in ABC[:3]
    ]
    + [ABC[3] + b"\n\n"],
    "after the end mark": [*(each + b"\n\n" for each in ABC), b": bye\n\n", ABC[0] + b"\n\n"],
}


def check(reply) -> None:
    """What a client that reads line by line, and decodes each line, is happy with."""
    assert (reply.status, reply.complete) == (200, True)
    assert not re.search(rb"\r(?!\n)", reply.body)
    data = reply.events
    assert all(data), "an event with empty data"
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    decoded = [json.loads(each) for each in data[:-1]]
    assert all(isinstance(each, dict) and each["choices"] for each in decoded)
    assert contents(decoded) == ["a", "b", "c"]


@pytest.mark.parametrize("how", STREAMS)
async def test_read_by_line(stub, serve, how) -> None:
    worker = await stub()
    served = await serve(worker)
    data = b"".join(STREAMS[how])
    worker.plays(raw_stream(*STREAMS[how]))
    check(await ask(served.url, CHAT, chat(stream=True)))
    worker.plays(raw_stream(data))
    check(await ask(served.url, CHAT, chat(stream=True)))
    rng = random.Random(how)
    for _ in range(8):
        cuts = sorted(rng.sample(range(1, len(data)), 6))
        edges = zip([0, *cuts], [*cuts, len(data)], strict=True)
        pieces: list[bytes | float] = []
        for start, end in edges:
            pieces += [data[start:end], 0.001]
        worker.plays(raw_stream(*pieces))
        check(await ask(served.url, CHAT, chat(stream=True)))


@pytest.mark.parametrize("how", STREAMS)
async def test_read_by_the_sdk(stub, serve, how) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(raw_stream(*STREAMS[how]))
    texts: list[str] = []
    await read_stream(served.url, chat(stream=True), texts)
    assert [text for text in texts if text] == ["a", "b", "c"]


@pytest.mark.parametrize("how", ["CRLF everywhere", "CR everywhere", "ids", "pretty printed"])
async def test_text_completions_too(stub, serve, how) -> None:
    worker = await stub()
    served = await serve(worker)
    pieces = [
        each.replace(b'"delta":{"content":"', b'"text":"')
        .replace(b'"}}', b'"}')
        .replace(b'"},"finish', b'","finish')
        for each in STREAMS[how]
    ]
    if how == "pretty printed":
        pieces = [
            b"".join(
                b"data: " + line.encode() + b"\n"
                for line in json.dumps(
                    {"choices": [{"index": 0, "text": text, "finish_reason": end}]}, indent=1
                ).splitlines()
            )
            + b"\n"
            for text, end in (("a", None), ("b", None), ("c", "stop"))
        ] + [DONE]
    worker.plays(raw_stream(*pieces))
    check(await ask(served.url, COMPLETIONS, body_for(COMPLETIONS, stream=True)))


async def test_long_waits_with_comments_are_kept_alive(stub, serve) -> None:
    """Comments count as signs of life; they pass once the answer has begun."""
    worker = await stub()
    served = await serve(worker, **{"workers.idle_timeout_s": 1.0})
    pings: list[bytes | float] = [b": ping\n\n", 0.1] * 12
    worker.plays(raw_stream(*pings, delta("a"), *pings, delta("b"), STOP, DONE))
    reply = await ask(served.url, CHAT, chat(stream=True))
    assert (reply.text, reply.events[-1]) == ("ab", "[DONE]")
    assert reply.body.endswith(STOP + DONE)


async def test_a_large_event_passes(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    text = "y" * 500_000
    worker.plays(raw_stream(delta(text), STOP, DONE))
    reply = await ask(served.url, CHAT, chat(stream=True))
    assert reply.body == delta(text) + STOP + DONE


async def test_a_type_with_parameters_is_a_stream(stub, serve) -> None:
    from rig import END, chunk, head

    worker = await stub()
    served = await serve(worker)
    for kind in ("text/event-stream; charset=utf-8", "Text/Event-Stream", "text/event-stream;x=y"):
        start = head(200, ("content-type", kind), ("transfer-encoding", "chunked"))
        worker.plays([start, *map(chunk, CASE), END])
        reply = await ask(served.url, CHAT, chat(stream=True))
        check(reply)
        assert reply.header("content-type").lower().startswith("text/event-stream")
