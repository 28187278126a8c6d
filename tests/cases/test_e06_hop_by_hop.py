"""E06: headers of one connection do not cross to the other, in either direction."""

from __future__ import annotations

import json

import pytest
from caserig import COMPLETIONS, body_for
from rig import CHAT, DONE, END, ROLE, STOP, ask, chunk, completion, delta, head

FROM_CLIENT = (
    ("Connection", "keep-alive, X-Secret-Hop"),
    ("X-Secret-Hop", "1"),
    ("Keep-Alive", "timeout=9"),
    ("TE", "trailers"),
    ("Trailer", "x"),
    ("Proxy-Authorization", "y"),
    ("Proxy-Connection", "keep-alive"),
    ("Upgrade", "h2c"),
    ("HTTP2-Settings", "AAMAAABkAAQAoAAAAAIAAAAA"),
    ("Proxy-Authentication-Info", "z"),
)
SPEAKS_FOR_THE_GATEWAY = (
    ("Set-Cookie", "session=worker; Path=/"),
    ("Set-Cookie", "lb=s1"),
    ("Set-Cookie2", "a=b"),
    ("Alt-Svc", 'h2="worker:443"'),
    ("Strict-Transport-Security", "max-age=1"),
)
"""A client would take these for the gateway's own: it knows no worker."""
HOPS = {name.lower() for name, _ in FROM_CLIENT} - {"connection"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings", "/v1/rerank"])
async def test_none_of_the_clients_reaches_the_worker(stub, serve, path: str) -> None:
    worker = await stub()
    served = await serve(worker)
    body = {"model": "m", "input": "x"} if "e" in path[4:6] else body_for(path, "x")
    headers = (*FROM_CLIENT, ("Authorization", "Bearer client-key"), ("X-Kept", "2"))
    reply = await ask(served.url, path, body, *headers)
    assert reply.status == 200, reply.body
    (seen,) = worker.seen
    names = {name.lower() for name, _ in seen.headers}
    assert not names & HOPS
    assert "client-key" not in seen.raw_head.decode()
    assert "X-Secret-Hop" not in (seen.header("connection") or "")
    assert seen.values("host") == [worker.url.removeprefix("http://")]
    assert seen.header("x-kept") == "2"


async def test_the_host_is_the_workers(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)
    client = await dial(served.url)
    data = json.dumps(body_for(CHAT, "x")).encode()
    head_lines = [
        f"POST {CHAT} HTTP/1.1",
        "Host: evil",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    client.writer.write("\r\n".join(head_lines).encode() + b"\r\n\r\n" + data)
    assert (await client.read()).status == 200
    assert worker.seen[0].values("host") == [worker.url.removeprefix("http://")]


@pytest.mark.parametrize("stream", [True, False])
async def test_none_of_the_workers_reaches_the_client(stub, serve, stream: bool) -> None:
    worker = await stub()
    served = await serve(worker)
    hops = (
        ("Connection", "close, X-W"),
        ("X-W", "1"),
        ("Keep-Alive", "timeout=1"),
        ("Proxy-Authenticate", "Basic"),
        ("Upgrade", "h2c"),
        ("Proxy-Authentication-Info", "z"),
        ("X-Kept", "3"),
        *SPEAKS_FOR_THE_GATEWAY,
    )
    if stream:
        kind = (("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked"))
        worker.plays([head(200, *hops, *kind), chunk(ROLE + delta("a") + STOP + DONE), END])
    else:
        body = completion()[0].split(b"\r\n\r\n", 1)[1]
        kind = (("Content-Type", "application/json"), ("Content-Length", str(len(body))))
        worker.plays([head(200, *hops, *kind) + body])
    reply = await ask(served.url, CHAT, body_for(CHAT, "x", stream=stream))
    assert reply.status == 200
    names = [name.lower() for name, _ in reply.headers]
    dropped = {"x-w", *(name.lower() for name, _ in hops[2:5] + SPEAKS_FOR_THE_GATEWAY)}
    assert not (dropped | {"proxy-authentication-info"}) & set(names)
    assert "X-W" not in (reply.header("connection") or "")
    assert reply.header("x-kept") == "3"
    assert len([n for n in names if n in ("content-length", "transfer-encoding")]) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_an_upgrade_that_a_worker_offers_is_no_reason_to_break(
    stub, serve, stream: bool
) -> None:
    """Apache's httpd does so on every answer."""
    worker = await stub()
    served = await serve(worker)
    body = completion()[0].split(b"\r\n\r\n", 1)[1]
    offer = (("Connection", "Upgrade, Keep-Alive"), ("Upgrade", "h2,h2c"))
    if stream:
        kind = (("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked"))
        worker.plays([head(200, *offer, *kind), chunk(ROLE + delta("a") + STOP + DONE), END])
    else:
        kind = (("Content-Type", "application/json"), ("Content-Length", str(len(body))))
        worker.plays([head(200, *offer, *kind) + body])
    for _ in range(3):
        reply = await ask(served.url, CHAT, body_for(CHAT, "x", stream=stream))
        assert (reply.status, reply.complete) == (200, True)
        assert reply.header("upgrade") is None
    assert len(worker.seen) == 3


async def test_an_upgrade_is_not_made_and_expect_is_answered(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)
    client = await dial(served.url)
    data = json.dumps(body_for(CHAT, "x")).encode()
    await client.send("POST", CHAT, data, ("Expect", "100-continue"))
    reply = await client.read()
    assert reply.status == 200
    assert worker.seen[0].header("expect") is None
