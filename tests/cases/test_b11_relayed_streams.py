"""B11, A06 and A07 on the routes whose streams have another form: Responses and Messages.

The same kinds: nothing is retried after content; before it another worker is tried, or the status
tells; a stream that breaks off says so.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from caserig import check_error, counts, first_then, inflight
from rig import CLOSE, CUT, END, HANG, SSE_HEAD, ask, chunk, eventually, head


def named(kind: str, **more: Any) -> bytes:
    """An event with its name, as both routes send them."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


RESPONSES = (
    [
        named("response.created", response={"id": "r"}),
        named("response.in_progress", response={"id": "r"}),
        named("response.output_item.added", item={"id": "i"}),
        named("response.content_part.added", part={"text": ""}),
    ],
    [
        named("response.output_text.delta", delta="one "),
        named("response.output_text.delta", delta="two 🌍"),
    ],
    [named("response.completed", response={"id": "r", "error": None})],
)
MESSAGES = (
    [
        named("message_start", message={"id": "m"}),
        named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        named("ping"),
    ],
    [
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": "one 🌍"}),
        named("content_block_stop", index=0),
    ],
    [named("message_delta", delta={"stop_reason": "end_turn"}), named("message_stop")],
)
ROUTES = {"/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
ENDS = {"cut": [0.05, CUT], "closed": [0.05, CLOSE], "ended": [END]}
BODY = {"model": "m", "input": "x", "max_tokens": 9, "messages": [], "stream": True}


def script(events: list[bytes], *end: Any) -> list[Any]:
    """A stream of these events."""
    return [SSE_HEAD, *(chunk(each) for each in events), *(end or (END,))]


@pytest.mark.parametrize("how", [*ENDS, "error"])
@pytest.mark.parametrize("path", ROUTES)
async def test_before_content_another_worker_is_tried(stub, serve, path: str, how: str) -> None:
    opening, content, ending = ROUTES[path]
    stubs = [await stub(), await stub()]
    served = await serve(*stubs)
    whole = [*opening, *content, *ending]
    failure = named("error", error={"type": "server_error", "message": "boom"})
    for held in range(len(opening) + 1):
        begun = opening[:held]
        bad = script([*begun, failure]) if how == "error" else script(begun, *ENDS[how])
        answers = first_then(bad, script(whole))
        for each in stubs:
            each.respond = answers
        before = sum(counts(stubs))
        reply = await ask(served.url, path, BODY)
        assert (reply.status, reply.complete) == (200, True)
        assert reply.body == b"".join(whole), "only the good stream, byte for byte"
        assert sum(counts(stubs)) - before == 2
    assert sum((await inflight(served.admin)).values()) == 0


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("path", ROUTES)
async def test_after_content_the_error_is_told(stub, serve, path: str, how: str) -> None:
    opening, content, _ = ROUTES[path]
    stubs = [await stub(), await stub()]
    served = await serve(*stubs)
    begun = [*opening, *content]
    for each in stubs:
        each.plays(script([*begun, b"event: response.out"], *ENDS[how]))
    reply = await ask(served.url, path, BODY)
    assert (reply.status, reply.complete) == (200, True)
    assert reply.body.startswith(b"".join(begun) + b"event: error\n")
    told = json.loads(reply.events[-1])
    assert told["type"] == "error"
    assert told["error"]["message"]
    assert len(reply.events) == len(begun) + 1
    assert sum(counts(stubs)) == 1
    assert sum((await inflight(served.admin)).values()) == 0


@pytest.mark.parametrize("path", ROUTES)
async def test_an_error_before_content_has_its_status(stub, serve, path: str) -> None:
    worker = await stub()
    served = await serve(worker)
    opening, content, ending = ROUTES[path]
    worker.plays(script([*opening[:1], named("error", error={"message": "boom", "code": 400})]))
    assert "boom" in check_error(await ask(served.url, path, BODY), 400)["message"]
    failed = {"id": "r", "error": {"code": "server_error", "message": "no memory"}}
    worker.plays(script([*opening, named("response.failed", response=failed)]))
    assert "no memory" in check_error(await ask(served.url, path, BODY), 502)["message"]
    worker.plays(script([*opening, *content, *ending]))
    assert (await ask(served.url, path, BODY)).body == b"".join([*opening, *content, *ending])


@pytest.mark.parametrize("path", ROUTES)
async def test_what_is_packed_passes_as_it_is(stub, serve, path: str) -> None:
    worker = await stub()
    served = await serve(worker)
    kind = (("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked"))
    packed = gzip.compress(b"".join(each for part in ROUTES[path] for each in part))
    worker.plays([head(200, *kind, ("Content-Encoding", "gzip")), chunk(packed), END])
    reply = await ask(served.url, path, BODY, ("Accept-Encoding", "gzip"))
    assert (reply.status, reply.complete, reply.body) == (200, True, packed)


@pytest.mark.parametrize("path", ROUTES)
async def test_an_error_of_the_workers_own_after_content_passes_once(
    stub, serve, path: str
) -> None:
    worker = await stub()
    served = await serve(worker)
    opening, content, _ = ROUTES[path]
    whole = [*opening, *content, named("error", error={"type": "server_error", "message": "boom"})]
    worker.plays(script(whole))
    reply = await ask(served.url, path, BODY)
    assert (reply.complete, reply.body) == (True, b"".join(whole))


@pytest.mark.parametrize("why", ["late", "shutdown"])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_that_is_ended_from_here_says_so(
    stub, serve, dial, path: str, why: str
) -> None:
    """F02: as in a chat, an error event and a clean end."""
    opening, content, _ = ROUTES[path]
    worker = await stub()
    served = await serve(worker)
    worker.plays(script([*opening, *content], HANG))
    header = (("x-headwater-timeout", "2"),) if why == "late" else ()
    client = await dial(served.url)
    await client.send("POST", path, json.dumps(BODY).encode(), *header)
    reply = await client.read(bodyless=True)
    pieces = client.chunks()
    said = b"".join([*opening, *content])
    while len(reply.body) < len(said):
        reply.body += await anext(pieces)
    assert reply.body == said
    if why == "shutdown":
        served.gateway.pipeline.abort_all()
    async for piece in pieces:
        reply.body += piece
    assert reply.status == 200
    last = json.loads(reply.events[-1])
    assert last["type"] == "error"
    assert last["error"]["message"]
    assert await inflight(served.admin) == {worker.id: 0}


@pytest.mark.parametrize("mark", [[], [b"data: [DONE]\n\n"]], ids=["", "end mark"])
@pytest.mark.parametrize("path", ROUTES)
async def test_nobody_waits_for_a_worker_that_has_said_all(
    stub, serve, path: str, mark: list[bytes]
) -> None:
    worker = await stub()
    served = await serve(worker)
    whole = [each for part in ROUTES[path] for each in part] + mark
    worker.plays(script(whole, HANG))
    async with asyncio.timeout(30):
        reply = await ask(served.url, path, BODY)
    assert (reply.status, reply.complete) == (200, True)
    assert reply.body == b"".join(whole)
    await eventually(lambda: worker.seen[0].closed_at)
    assert await inflight(served.admin) == {worker.id: 0}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_malformed_event_is_no_content(stub, serve, path: str) -> None:
    """It is dropped wherever it comes, and a failure behind it is asked elsewhere."""
    opening, content, ending = ROUTES[path]
    stubs = [await stub(), await stub()]
    served = await serve(*stubs)
    odd, whole = b"data: {not json\n\n", [*opening, *content, *ending]
    answers = first_then(
        script([*opening, odd], CUT), script([odd, *opening, *content, odd, *ending])
    )
    for each in stubs:
        each.respond = answers
    reply = await ask(served.url, path, BODY)
    assert (reply.status, reply.complete, reply.body) == (200, True, b"".join(whole))
    assert counts(stubs) == [1, 1]
