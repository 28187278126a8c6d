"""B20: a kept connection that the worker closes just now costs no request and doubles none.

Scaled: workers close connections after 0.4 s of idleness, and 300 requests have gaps around that.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from caserig import COMPLETIONS, body_for, piece
from rig import CHAT, DONE, Seen, ask, completion, event, raw_stream

IDLE_S = 0.4


def script(seen: Seen) -> Any:
    """A whole answer or a stream, as asked."""
    if not seen.json.get("stream"):
        return completion()
    path = seen.target
    return raw_stream(event(piece(path, "x")), event(piece(path, finish="stop")) + DONE)


async def talk(served: Any, n: int, clients: int, path: str, rng: random.Random) -> None:
    """So many requests by so many clients, with gaps around the idle limit; all answered."""

    async def one(client: int) -> None:
        for number in range(n // clients):
            stream = rng.random() < 0.5
            body = body_for(path, f"{path} {client} {number}", stream=stream)
            reply = await ask(served.url, path, body)
            assert reply.status == 200, reply.body
            assert reply.complete
            assert reply.header("x-headwater-attempts") == "1"
            if stream:
                assert reply.events[-1] == "[DONE]"
            await asyncio.sleep(IDLE_S * rng.uniform(0.97, 1.03))

    await asyncio.gather(*(one(client) for client in range(clients)))


def check_once(workers: list[Any], n: int) -> None:
    """Each request has reached exactly one handler once."""
    texts: Counter[str] = Counter()
    for worker in workers:
        for seen in worker.seen:
            body = seen.json
            texts[body["prompt"] if "prompt" in body else body["messages"][0]["content"]] += 1
    assert sum(texts.values()) == n
    assert set(texts.values()) == {1}


@pytest.mark.parametrize("client", ["httptools", "aiohttp"])
async def test_a_worker_that_closes_after_a_while(stub, serve, client: str) -> None:
    workers = [await stub()]
    served = await serve(*workers, **{"workers.http_client": client})
    for worker in workers:
        worker.respond = script
        worker.close_idle_s = IDLE_S
    for path in (CHAT, COMPLETIONS):
        await talk(served, 150, 50, path, random.Random(1))
    check_once(workers, 300)


async def test_a_worker_that_closes_after_each_answer(stub, serve) -> None:
    """It announces keep-alive, answers, and closes."""
    workers = [await stub(), await stub()]
    served = await serve(*workers)
    for worker in workers:
        worker.respond = script
        worker.close_after_answer = True
    await talk(served, 400, 100, CHAT, random.Random(2))
    check_once(workers, 400)


async def test_a_worker_that_is_started_again_between_requests(stub, serve) -> None:
    """Every kept connection is gone at once, and the next request meets it."""
    worker = await stub()
    served = await serve(worker, **{"workers.health_interval_s": 30.0})
    worker.respond = script
    for turn in range(10):
        replies = await asyncio.gather(
            *(ask(served.url, CHAT, body_for(CHAT, f"{turn}-{n}")) for n in range(10))
        )
        assert {reply.status for reply in replies} == {200}
        await worker.stop()
        await worker.listen()
    check_once([worker], 100)


async def test_errors_on_kept_connections_are_not_sent_twice(stub, serve) -> None:
    """A worker that answers 400 and closes is asked once, too."""
    from rig import plain

    worker = await stub()
    served = await serve(worker)
    worker.respond = lambda seen: plain(b"no", 400)
    worker.close_after_answer = True
    for n in range(20):
        assert (await ask(served.url, CHAT, body_for(CHAT, f"{n}"))).status == 400
    assert len(worker.seen) == 20
