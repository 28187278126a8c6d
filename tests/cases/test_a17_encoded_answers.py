"""A17: what is declared about a body fits the body, whatever the worker packs."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for, sdk, total
from rig import (
    CHAT,
    CLOSE,
    DONE,
    END,
    ROLE,
    SSE_HEAD,
    STOP,
    Reply,
    Seen,
    ask,
    chat,
    chunk,
    delta,
    head,
    plain,
    usage,
)

JSON_TYPE = ("Content-Type", "application/json")
TEXT = "".join(f"{n:x} " for n in range(64_000))
WHOLE = json.dumps(
    {
        "id": "c-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT},
                "finish_reason": "stop",
            }
        ],
        "usage": usage(),
    }
).encode()
PACKERS: dict[str, Any] = {"gzip": gzip.compress, "deflate": zlib.compress}
ACCEPTS = {
    "gzip": "gzip",
    "identity": "identity",
    "all": "gzip, deflate, br",
    "none of it": "gzip;q=0",
    "nothing said": None,
}


def allowed(seen: Seen, coding: str) -> bool:
    """Whether the request lets a worker use a coding, read as a strict server would."""
    said = seen.header("accept-encoding")
    if said is None:
        return True  # everything is acceptable then
    for part in said.lower().split(","):
        name, _, weight = part.strip().partition(";q=")
        if name in (coding, "*"):
            return not weight or float(weight) > 0
    return False


def unpacked(reply: Reply, accept: str | None) -> bytes:
    """The body as its own headers declare it, in a coding that was accepted."""
    assert reply.complete
    assert reply.header("content-length") == str(len(reply.body))
    coding = reply.header("content-encoding")
    if coding is None or coding == "identity":
        return reply.body
    assert accept is None or (coding in accept and f"{coding};q=0" not in accept)
    return gzip.decompress(reply.body) if coding == "gzip" else zlib.decompress(reply.body)


@pytest.mark.parametrize("coding", PACKERS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings"])
async def test_every_client_gets_the_right_json(stub, serve, path, coding) -> None:
    worker = await stub()
    served = await serve(worker)
    assert len(WHOLE) > 300_000

    def respond(seen: Seen) -> list[Any]:
        if not allowed(seen, coding):
            return plain(WHOLE, 200, JSON_TYPE)
        packed = PACKERS[coding](WHOLE)
        return plain(packed, 200, JSON_TYPE, ("Content-Encoding", coding))

    worker.respond = respond
    for accept in ACCEPTS.values():
        headers = [] if accept is None else [("Accept-Encoding", accept)]
        reply = await ask(served.url, path, body_for(path), *headers)
        assert reply.status == 200
        assert json.loads(unpacked(reply, accept)) == json.loads(WHOLE)
    if path != "/v1/embeddings":
        # Its tokens were counted, so the gateway could read what it passed on.
        cached = await total(served.admin, "headwater_prompt_tokens_total", source="cached")
        assert cached == 4.0 * len(ACCEPTS)


async def test_refusals_can_be_read(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    refusal = json.dumps({"error": {"message": "too long", "type": "t"}}).encode()

    def respond(seen: Seen) -> list[Any]:
        if allowed(seen, "gzip"):
            return plain(gzip.compress(refusal), 400, JSON_TYPE, ("Content-Encoding", "gzip"))
        return plain(refusal, 400, JSON_TYPE)

    worker.respond = respond
    for accept in ("gzip", "identity"):
        reply = await ask(served.url, CHAT, chat(), ("Accept-Encoding", accept))
        assert reply.status == 400
        error = json.loads(unpacked(reply, accept))["error"]
        assert error["message"] == "too long"


async def test_the_sdk_reads_it(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)

    def respond(seen: Seen) -> list[Any]:
        if allowed(seen, "gzip"):
            packed = gzip.compress(WHOLE)
            return plain(packed, 200, JSON_TYPE, ("Content-Encoding", "gzip"))
        return plain(WHOLE, 200, JSON_TYPE)

    worker.respond = respond
    async with sdk(served.url) as client:
        answer = await client.chat.completions.create(**chat())
    assert answer.choices[0].message.content == TEXT


@pytest.mark.parametrize("accept", ["gzip", "identity"])
async def test_a_stream_is_not_held_back(stub, serve, dial, accept) -> None:
    """The worker packs its stream if it may, flushes each delta, and waits with the second one."""
    worker = await stub()
    served = await serve(worker)
    go_on = asyncio.Event()

    def respond(seen: Seen) -> list[Any]:
        packer = zlib.compressobj(wbits=31) if allowed(seen, "gzip") else None

        def data(raw: bytes) -> bytes:
            if packer is None:
                return chunk(raw)
            return chunk(packer.compress(raw) + packer.flush(zlib.Z_SYNC_FLUSH))

        start = SSE_HEAD
        if packer is not None:
            start = SSE_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n"
        return [start, data(ROLE + delta("a")), go_on, data(delta("b") + STOP + DONE), END]

    worker.respond = respond
    client = await dial(served.url)
    body = json.dumps(chat(stream=True)).encode()
    await client.send("POST", CHAT, body, ("Accept-Encoding", accept))
    async with asyncio.timeout(30):
        raw_head = await client.reader.readuntil(b"\r\n\r\n")
        pieces = client.chunks()
        first = await anext(pieces)
        go_on.set()
        rest = [piece async for piece in pieces]
    assert b"content-encoding" not in raw_head.lower()
    assert first == ROLE + delta("a")
    assert b"".join(rest) == delta("b") + STOP + DONE


async def test_a_length_that_lies_is_no_answer(stub, serve) -> None:
    """The worker declares more than it sends: never passed on as whole."""
    worker = await stub()
    served = await serve(worker)
    short = head(200, JSON_TYPE, ("Content-Length", str(len(WHOLE)))) + WHOLE[:1000]
    worker.plays([short, 0.02, CLOSE])
    reply = await ask(served.url, CHAT, chat())
    assert reply.status == 502
    assert json.loads(reply.body)["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings"])
@pytest.mark.parametrize("coding", [*PACKERS, "GZIP", "br", "none"])
async def test_an_error_that_the_worker_packed_can_be_read(stub, serve, path, coding) -> None:
    error = {"message": "too long é", "type": "t", "param": "p", "code": "c"}
    body = json.dumps({"error": error}).encode()
    packed = PACKERS.get(coding.lower(), lambda data: data)(body)
    headers = [] if coding == "none" else [("Content-Encoding", coding)]
    worker = await stub()
    worker.plays(plain(packed, 400, JSON_TYPE, *headers))
    served = await serve(worker)
    asked = body_for(path) if path != "/v1/embeddings" else {"model": "m", "input": "x"}
    reply = await ask(served.url, path, asked, ("Accept-Encoding", "gzip, deflate, br"))
    assert reply.status == 400
    assert reply.header("content-encoding") is None
    assert reply.complete
    if coding == "br":
        error = {**error, "message": "The worker answered with status 400."}
        error |= {"type": "invalid_request_error", "param": None, "code": None}
    assert reply.json == {"error": error}
