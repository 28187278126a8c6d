"""B13: retries do not multiply the load of a fleet that fails.

Scaled: 100 requests at 200/s instead of 200 at 50/s; workers hang for 0.3 s instead of 2 s.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from caserig import body_for, counts
from rig import CHAT, CUT, HANG, ROLE, SSE_HEAD, Seen, ask, chat, chunk, completion, plain
from stopwatch import Stopwatch

REQUESTS, RETRIES = 100, 2
OUTAGES: dict[str, list[Any]] = {
    "503": plain(b"", 503),
    "reset": [CUT],
    "reset after the role": [SSE_HEAD, chunk(ROLE), 0.01, CUT],
    "hang": [0.3, CUT],
}


async def load(served: Any, n: int, stream: bool = False) -> tuple[list[int], float]:
    """So many requests at 200/s; statuses and the longest wait."""
    longest = 0.0

    async def one(number: int) -> int:
        nonlocal longest
        await asyncio.sleep(number / 200)
        begun = Stopwatch()
        body = body_for(CHAT, f"{number} {number * 77}", stream=stream)
        reply = await ask(served.url, CHAT, body)
        longest = max(longest, begun.seconds())
        return reply.status

    return list(await asyncio.gather(*(one(number) for number in range(n)))), longest


@pytest.mark.parametrize("outage", OUTAGES)
async def test_a_total_outage_is_not_multiplied(stub, serve, outage: str) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers:
        worker.plays(OUTAGES[outage])
    statuses, longest = await load(served, REQUESTS, stream=SSE_HEAD in OUTAGES[outage])
    assert set(statuses) <= {500, 502, 503, 504}
    first = sum(counts(workers))
    assert first <= (1 + RETRIES) * REQUESTS
    assert longest < 60.0
    # The outage goes on: retries are rationed, once there were as many as requests at a time. On a
    # slow machine that is up to all of a load, which takes three loads more at most.
    attempts = []
    while not attempts or attempts[-1] > 1.2 * REQUESTS:
        assert len(attempts) < 5, attempts
        before = sum(counts(workers))
        statuses, longest = await load(served, REQUESTS, stream=SSE_HEAD in OUTAGES[outage])
        assert set(statuses) <= {500, 502, 503, 504}
        attempts.append(sum(counts(workers)) - before)
    # And it ends: no request is refused because of what was.
    for worker in workers:
        worker.plays(completion())
    statuses, _ = await load(served, 20)
    assert set(statuses) == {200}


async def test_a_loss_of_some_workers_costs_no_request(stub, serve) -> None:
    """Half of the fleet fails: everything is answered, with few more attempts than requests.

    The first ones show which half: what comes all at once before that may be tried thrice.
    """
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers[:2]:
        worker.plays(plain(b"x", 500))
    for part in (REQUESTS // 5, REQUESTS - REQUESTS // 5):
        statuses, _ = await load(served, part)
        assert set(statuses) == {200}
    assert sum(counts(workers)) <= 1.5 * REQUESTS


@pytest.mark.parametrize("outage", ["503", "reset"])
async def test_the_sdks_own_retries_stay_in_proportion(stub, serve, outage: str) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers:
        worker.plays(OUTAGES[outage])
    await load(served, REQUESTS)
    before = sum(counts(workers))

    async def one(client: openai.AsyncOpenAI, number: int) -> None:
        with pytest.raises(openai.APIError):
            await client.chat.completions.create(**chat(f"{number} {number * 77}"))

    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
        await asyncio.gather(*(one(client, number) for number in range(20)))
    assert sum(counts(workers)) - before <= 3 * 1.2 * 20 + 1


async def test_silence_is_bounded_by_the_requests_own_time(stub, serve) -> None:
    """All hang for good: who gave a time limit waits no longer than that."""
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    for worker in workers:
        worker.plays([HANG])
    begun = Stopwatch()
    replies = await asyncio.gather(
        *(
            ask(served.url, CHAT, body_for(CHAT, f"{n}"), ("x-headwater-timeout", "0.5"))
            for n in range(40)
        )
    )
    assert {reply.status for reply in replies} == {504}
    assert begun.seconds() < 5.0
    assert sum(counts(workers)) <= 1.2 * 40


async def test_an_idle_limit_bounds_silence_too(stub, serve) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers, **{"workers.idle_timeout_s": 0.2})
    for worker in workers:
        worker.plays([HANG])
    begun = Stopwatch()
    reply = await ask(served.url, CHAT, body_for(CHAT, "x"))
    assert reply.status == 504
    assert begun.seconds() < 5.0
    assert sum(counts(workers)) <= 1 + RETRIES


async def test_each_attempt_is_on_another_worker(stub, serve) -> None:
    workers = [await stub() for _ in range(4)]
    served = await serve(*workers)
    tried: list[str] = []

    def note(worker: Any) -> Any:
        def respond(seen: Seen) -> Any:
            tried.append(worker.id)
            return plain(b"x", 500)

        return respond

    for worker in workers:
        worker.respond = note(worker)
    assert (await ask(served.url, CHAT, body_for(CHAT, "x"))).status == 500
    assert len(tried) == len(set(tried)) == 1 + RETRIES
