"""B21: no limit of a library ends a healthy stream or makes the 101st wait.

Scaled: a stream lasts more than six times the idle limit. With both HTTP clients for workers, since
one of them is a library with limits of its own (five minutes in all, 100 connections).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for, contents, piece
from rig import CHAT, DONE, END, HANG, SSE_HEAD, RawClient, ask, chunk, event

from shared import laxjson

CLIENTS = ["httptools", "aiohttp"]


def slow(path: str, deltas: int, gap_s: float) -> list[Any]:
    """A stream with so many deltas."""
    actions: list[Any] = [SSE_HEAD]
    for n in range(deltas):
        actions += [chunk(event(piece(path, f"{n} "))), gap_s]
    return [*actions, chunk(event(piece(path, finish="stop")) + DONE), END]


def texts(reply: Any) -> list[str]:
    return contents([laxjson.decode(data.encode()) for data in reply.events if data != "[DONE]"])


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_outlives_every_idle_limit(stub, serve, path: str, client: str) -> None:
    worker = await stub()
    limits = {"workers.idle_timeout_s": 0.6, "workers.http_client": client}
    served = await serve(worker, **limits)
    worker.plays(slow(path, 80, 0.05))
    reply = await ask(served.url, path, body_for(path, "x", stream=True))
    assert reply.complete
    assert texts(reply) == [f"{n} " for n in range(80)]
    assert reply.events[-1] == "[DONE]"


@pytest.mark.parametrize("client", CLIENTS)
async def test_three_hundred_streams_at_once(stub, serve, client: str) -> None:
    worker = await stub()
    patient = {"workers.connect_timeout_s": 60.0}
    served = await serve(worker, **{"workers.http_client": client}, **patient)
    all_begun = asyncio.Event()
    ends = chunk(event(piece(CHAT, finish="stop")) + DONE)
    worker.plays([SSE_HEAD, chunk(event(piece(CHAT, "x"))), all_begun, ends, END])
    begun = 0

    async def one(number: int) -> None:
        nonlocal begun
        client = await RawClient.connect(served.url)
        body = body_for(CHAT, f"{number}", stream=True)
        await client.send("POST", CHAT, laxjson.encode(body))
        await client.reader.readuntil(b"\r\n\r\n")
        pieces = client.chunks()
        got = await anext(pieces)
        begun += 1
        if begun == 300:
            all_begun.set()
        async for part in pieces:
            got += part
        assert b"[DONE]" in got
        client.close()

    # None of them ends before all have begun: whoever waited for another one would wait for ever.
    async with asyncio.timeout(100):
        await asyncio.gather(*(one(number) for number in range(300)))
    assert len(worker.seen) == 300


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_silence_is_cut_with_an_error_event_and_anything_is_no_silence(
    stub, serve, path: str
) -> None:
    """Comments count as life, too."""
    worker = await stub()
    served = await serve(worker, **{"workers.idle_timeout_s": 1.0})
    worker.plays([SSE_HEAD, chunk(event(piece(path, "x"))), HANG])
    begun = time.monotonic()
    reply = await ask(served.url, path, body_for(path, "x", stream=True))
    assert 0.9 < time.monotonic() - begun < 30.0
    assert texts(reply) == ["x"]
    assert "error" in laxjson.decode(reply.events[-1].encode())
    beats: list[Any] = [SSE_HEAD, chunk(event(piece(path, "x")))]
    for _ in range(15):
        beats += [0.1, chunk(b": still here\n\n")]
    ends = chunk(event(piece(path, finish="stop")) + DONE)
    worker.plays([*beats, ends, END])
    reply = await ask(served.url, path, body_for(path, "x", stream=True))
    assert reply.events[-1] == "[DONE]"
    assert texts(reply) == ["x"]


async def test_a_slow_head_is_no_end(stub, serve) -> None:
    """A long prefill behind a queue: the limit is on silence, and it is the configured one."""
    worker = await stub()
    served = await serve(
        worker, **{"workers.idle_timeout_s": 5.0, "workers.connect_timeout_s": 1.0}
    )
    worker.plays([1.5, *slow(CHAT, 2, 0.0)])
    reply = await ask(served.url, CHAT, body_for(CHAT, "x", stream=True))
    assert reply.status == 200
    assert texts(reply) == ["0 ", "1 "]
