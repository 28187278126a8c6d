"""Shutdown while clients are still sending: what runs is finished, what has not come is not."""

from __future__ import annotations

import asyncio
import json

import pytest
from rig import CHAT, RawClient, chat, delta, eventually, stream
from stopwatch import Stopwatch

BODY = json.dumps(chat()).encode()


async def half_sent(url: str, framing: str) -> RawClient:
    """A client that has sent the head and the first byte of a body."""
    client = await RawClient.connect(url)
    first = b"{" if framing.startswith("Content") else b"1\r\n{\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
    client.writer.write(head.encode() + first)
    return client


@pytest.mark.parametrize("framing", [f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"])
async def test_half_sent_bodies_hold_up_no_shutdown(stub, serve, framing) -> None:
    worker = await stub()
    worker.plays(stream(*[delta("x")] * 6, gap_s=0.05))
    served = await serve(worker)
    slow = [await half_sent(served.url, framing) for _ in range(5)]
    runner = await RawClient.connect(served.url)
    await runner.send("POST", CHAT, json.dumps(chat(stream=True)).encode())
    await eventually(lambda: worker.seen)
    drain = asyncio.create_task(served.gateway.drain())
    reply = await runner.read()
    assert (reply.complete, reply.events[-1]) == (True, "[DONE]")
    ended = Stopwatch()
    await drain
    await served.gateway.close()
    assert ended.seconds() < 2.0
    for client in (*slow, runner):
        client.close()
    assert len(worker.seen) == 1


async def test_a_body_that_ends_while_draining_is_refused(stub, serve) -> None:
    worker = await stub()
    was_refused = asyncio.Event()
    begin, *rest = stream(delta("x"))
    worker.plays([begin, was_refused, *rest])
    served = await serve(worker)
    slow = await half_sent(served.url, f"Content-Length: {len(BODY)}")
    runner = await RawClient.connect(served.url)
    await runner.send("POST", CHAT, json.dumps(chat(stream=True)).encode())
    await eventually(lambda: worker.seen)
    drain = asyncio.create_task(served.gateway.drain())
    await asyncio.sleep(0)  # it has begun
    slow.writer.write(BODY[1:])
    refused = await asyncio.wait_for(slow.read(), 30)
    was_refused.set()
    assert refused.status == 503
    assert refused.header("retry-after")
    assert refused.header("connection") == "close"
    assert (await runner.read()).events[-1] == "[DONE]"
    await drain
    assert len(worker.seen) == 1
    slow.close()
    runner.close()
