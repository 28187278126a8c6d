"""A16: a client that leaves ends the worker's work.

Scaled: the stub's deltas come each 100 ms in the first test and each 10 ms in the 100 repeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for, inflight, piece, sdk, settles
from rig import (
    CHAT,
    DONE,
    END,
    HANG,
    ROLE,
    SSE_HEAD,
    STOP,
    RawClient,
    Stub,
    ask,
    chat,
    chunk,
    completion,
    delta,
    event,
    eventually,
    head,
    plain,
)
from stopwatch import Stopwatch
from workerrig import Client


def endless(path: str = CHAT, gap_s: float = 0.1, seconds: float = 60.0) -> list[Any]:
    """A delta each ``gap_s``."""
    one = chunk(event(piece(path, "x")))
    return [SSE_HEAD, *[one, gap_s] * int(seconds / gap_s)]


async def reads(client: RawClient, deltas: int) -> None:
    """Read the head and so many chunks."""
    await client.reader.readuntil(b"\r\n\r\n")
    pieces = client.chunks()
    for _ in range(deltas):
        await anext(pieces)


async def post(client: RawClient, path: str, **fields: Any) -> None:
    """Send a request and wait for nothing."""
    await client.send("POST", path, json.dumps(body_for(path, **fields)).encode())


async def freed(worker: Stub, admin: str, left: Stopwatch) -> None:
    """The stub saw its last connection closed within 1 s, and nothing is counted there."""
    seen = worker.seen[-1]
    await eventually(lambda: seen.closed_at is not None, 1.5)
    assert left.seconds() < 1.0

    async def empty() -> bool:
        return (await inflight(admin))[worker.id] == 0

    await settles(empty, 1.0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_in_the_middle_of_a_stream(stub, serve, dial, path, how) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(endless(path))
    client = await dial(served.url)
    await post(client, path, stream=True)
    await reads(client, 3)
    assert (await inflight(served.admin))[worker.id] == 1
    left = Stopwatch()
    client.close() if how == "close" else client.abort()
    await freed(worker, served.admin, left)


WAITS: dict[str, list[Any]] = {
    "before the head": [HANG],
    "before the first content": [SSE_HEAD, chunk(ROLE), HANG],
    "within a whole answer": [
        head(200, ("Content-Type", "application/json"), ("Content-Length", "1000")) + b"{",
        HANG,
    ],
    "within an error": [head(400, ("Content-Length", "1000")) + b"{", HANG],
    "after the end mark": [SSE_HEAD, chunk(ROLE + delta("a") + STOP + DONE), HANG],
}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("how", WAITS)
async def test_while_the_gateway_waits(stub, serve, dial, how, streamed) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(WAITS[how])
    client = await dial(served.url)
    await post(client, CHAT, stream=streamed)
    await eventually(lambda: worker.seen)
    await asyncio.sleep(0.05)
    left = Stopwatch()
    client.close()
    await freed(worker, served.admin, left)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/tokenize"])
async def test_relayed_routes_too(stub, serve, dial, path) -> None:
    worker = await stub()
    served = await serve(worker)
    for turn, script in enumerate(([HANG], [SSE_HEAD, *[chunk(b"data: {}\n\n"), 0.05] * 1000])):
        worker.plays(script)
        client = await dial(served.url)
        await post(client, path, input="x")
        await eventually(lambda turn=turn: len(worker.seen) > turn)
        await asyncio.sleep(0.1)
        left = Stopwatch()
        client.close()
        await freed(worker, served.admin, left)


async def test_a_reader_that_stopped_reading_and_then_leaves(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)
    big = chunk(delta("y" * 100_000))
    worker.plays([SSE_HEAD, *[big] * 400, HANG])
    client = await dial(served.url)
    await post(client, CHAT, stream=True)
    await reads(client, 1)
    await asyncio.sleep(0.3)
    assert (await inflight(served.admin))[worker.id] == 1
    left = Stopwatch()
    client.abort()
    await freed(worker, served.admin, left)


async def test_during_a_second_attempt(stub, serve, dial) -> None:
    one, two = await stub(), await stub()
    served = await serve(one, two)
    taken: list[Stub] = []

    def respond(worker: Stub):
        def script(seen: object) -> list[Any]:
            taken.append(worker)
            return plain(b"no", 500) if len(taken) % 2 else [HANG]

        return script

    one.respond, two.respond = respond(one), respond(two)
    for n in range(5):
        client = await dial(served.url)
        await post(client, CHAT, stream=bool(n % 2), text=f"{n}")
        await eventually(lambda n=n: len(taken) == 2 * n + 2)
        left = Stopwatch()
        client.close()
        await freed(taken[-1], served.admin, left)
    assert sum((await inflight(served.admin)).values()) == 0


async def test_the_sdk_leaves(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(endless())
    async with sdk(served.url) as client:
        parts = await client.chat.completions.create(**chat(stream=True))
        for _ in range(3):
            await anext(parts)
        left = Stopwatch()
        await parts.close()
        await freed(worker, served.admin, left)
        worker.plays([HANG])
        waiting = asyncio.create_task(client.chat.completions.create(**chat()))
        await eventually(lambda: len(worker.seen) == 2)
        left = Stopwatch()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await freed(worker, served.admin, left)


async def test_a_hundred_times_leaves_no_sockets(stub, serve, dial) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(completion())
    assert (await ask(served.url, CHAT, chat())).status == 200
    await asyncio.sleep(0.1)
    idle = worker.open_connections
    worker.plays(endless(gap_s=0.01))
    for _ in range(10):
        clients = [await dial(served.url) for _ in range(10)]
        for client in clients:
            await post(client, CHAT, stream=True)
        await asyncio.gather(*(reads(client, 3) for client in clients))
        for client in clients:
            client.close()
    await eventually(lambda: all(seen.closed_at is not None for seen in worker.seen[1:]), 2.0)
    await eventually(lambda: worker.open_connections <= idle + 2, 2.0)
    assert (await inflight(served.admin))[worker.id] == 0


LONG = {"model": "fake", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


async def blocks_used(worker: Client) -> tuple[int, int, int]:
    """Running, waiting, KV blocks in use."""
    load = await worker.load()
    return load.get("running", 0), load.get("waiting", 0), load.get("blocks_used", 0)


async def test_our_own_worker_is_free_within_two_seconds(worker_process, serve, dial) -> None:
    """E instead of S1: running requests and used blocks are what they were before."""
    process = worker_process(env={"HEADWATER_FAKE__DECODE_MS_PER_STEP": "5"})
    served = await serve(**{"workers.urls": process.url})
    await eventually(lambda: served.gateway.router.ready()[0], 10.0)
    async with Client(process.url) as direct:
        before = await blocks_used(direct)
        for turn in range(5):
            clients = [await dial(served.url) for _ in range(8)]
            for n, client in enumerate(clients):
                text = f"{turn} {n} " + "tell me more " * 30
                # Half are left in mid-stream, half while they wait for a whole answer.
                await post(client, CHAT, text=text, **{**LONG, "stream": n % 2 == 0})

            async def busy() -> bool:
                return (await blocks_used(direct))[0] == 8

            await settles(busy, 5.0)
            await asyncio.gather(*(reads(client, 3) for client in clients[::2]))
            for client in clients:
                client.close()

            async def free(before: tuple[int, int, int] = before) -> bool:
                return await blocks_used(direct) == before

            await settles(free, 2.0)
        assert sum((await inflight(served.admin)).values()) == 0


async def test_it_says_when_it_was_cut_short(stub, serve, dial, log) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays([SSE_HEAD, chunk(ROLE + delta("a")), 0.05, chunk(delta("b")), HANG, END])
    client = await dial(served.url)
    await post(client, CHAT, stream=True)
    await reads(client, 2)
    client.close()
    await eventually(lambda: worker.seen[0].closed_at is not None)

    def told() -> list[str]:
        lines = [json.loads(line) for line in log.getvalue().splitlines()]
        return [line["outcome"] for line in lines if line["event"] == "request"]

    await eventually(told)
    assert told() == ["client_gone"]
