"""Bursts beyond what the workers may hold: a bounded queue, honest refusals, order and shares.

Each stub has room for two requests; four stubs and a queue of eight hold sixteen.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
from caserig import check_error, counts, inflight, metrics, settles, total
from rig import CHAT, Reply, ask, chat, completion, eventually
from stopwatch import Stopwatch

SMALL = {
    "admission.inflight_per_worker": 2,
    "admission.queue": 8,
    "admission.queue_s": 60.0,
}


async def slow(stub: Any, n: int, *before: float | asyncio.Event) -> list[Any]:
    """Stubs that take some time for each request, or wait for an event."""
    workers = [await stub() for _ in range(n)]
    for worker in workers:
        worker.plays([*before, *completion()])
    return workers


def texts(workers: list[Any]) -> list[str]:
    """What was asked, in the order in which it reached the workers."""
    seen = sorted((one for worker in workers for one in worker.seen), key=lambda one: one.at)
    return [one.json["messages"][0]["content"] for one in seen]


async def test_beyond_the_bound_is_503_with_an_honest_retry_after(stub, serve) -> None:
    all_came = asyncio.Event()
    workers = await slow(stub, 4, all_came, 1.0)
    served = await serve(*workers, **SMALL)

    async def burst(shed: int) -> list[Reply]:
        """Thirty requests of which none is done before all have come; so many are refused then."""
        all_came.clear()
        running = [asyncio.create_task(ask(served.url, CHAT, chat(f"{n}"))) for n in range(30)]

        async def told() -> bool:
            return await total(served.admin, "headwater_shed_total", reason="queue_full") == shed

        await settles(told, 10.0)
        all_came.set()
        return list(await asyncio.gather(*running))

    begun = time.monotonic()
    replies = await burst(14)
    took = time.monotonic() - begun
    refused = [reply for reply in replies if reply.status != 200]
    assert len(refused) == 30 - 16
    for reply in refused:
        error = check_error(reply, 503)
        assert error["code"] == "no_capacity"
        assert 1 <= int(reply.header("retry-after")) <= 60
    assert max(counts(workers)) <= 5
    assert took >= 1.9, "no worker had more than two at a time"
    assert set((await inflight(served.admin)).values()) == {0.0}
    # From what has been served since, the time is known: sixteen in about two seconds.
    late = await burst(28)
    hints = [int(reply.header("retry-after")) for reply in late if reply.status == 503]
    assert len(hints) == 14
    assert max(hints) <= 1 + 9 * 10 * took / 16


async def test_the_urgent_overtake_and_the_depth_is_shown(stub, serve) -> None:
    workers = await slow(stub, 1)
    # One of the two places becomes free, so that one after the other is taken in.
    free, end = asyncio.Event(), asyncio.Event()
    workers[0].plays([free, *completion()], [end, *completion()], completion())
    served = await serve(*workers, **SMALL)
    first = [asyncio.create_task(ask(served.url, CHAT, chat(f"first{n}"))) for n in range(2)]
    await eventually(lambda: sum(counts(workers)) == 2)

    async def send(name: str, priority: str, depth: int) -> asyncio.Task[Reply]:
        header = ("x-headwater-priority", priority)
        task = asyncio.create_task(ask(served.url, CHAT, chat(name), header))
        await waiting(served.admin, depth)
        return task

    later = [await send("idle", "3", 1), await send("usual", "0", 2), await send("urgent", "-2", 3)]
    read = await metrics(served.admin)
    depth = {
        dict(labels)["priority"]: value
        for (name, labels), value in read.items()
        if name == "headwater_queue_depth"
    }
    assert depth == {"-2": 1, "0": 1, "3": 1}
    free.set()
    await asyncio.gather(*later)
    end.set()
    await asyncio.gather(*first)
    assert texts(workers)[2:] == ["urgent", "usual", "idle"]
    assert await queued(served.admin) == 0


async def queued(admin: str) -> float:
    """Requests that wait in the gateway."""
    read = await metrics(admin)
    return sum(value for (name, _), value in read.items() if name == "headwater_queue_depth")


async def waiting(admin: str, wanted: int) -> None:
    """Return when so many wait."""

    async def as_many() -> bool:
        return await queued(admin) == wanted

    await settles(as_many, 10.0)


async def test_tenants_share_what_there_is(stub, serve) -> None:
    all_came = asyncio.Event()
    workers = await slow(stub, 1, all_came)
    many = {**SMALL, "admission.queue": 100, "listen.api_keys": ("one", "two"),
            "tenancy.unisolated": "allow"}  # fmt: skip
    served = await serve(*workers, **many)

    def send(key: str, n: int) -> asyncio.Task[Reply]:
        header = ("Authorization", f"Bearer {key}")
        return asyncio.create_task(ask(served.url, CHAT, chat(f"{key} {n}"), header))

    flood = [send("one", n) for n in range(24)]
    await waiting(served.admin, 22)
    few = [send("two", n) for n in range(6)]
    await waiting(served.admin, 28)
    all_came.set()
    assert {reply.status for reply in await asyncio.gather(*flood, *few)} == {200}
    order = texts(workers)
    last = max(place for place, text in enumerate(order) if text.startswith("two"))
    assert last <= 24, "the few did not wait until the flood was over"


async def test_a_deadline_that_cannot_be_met_is_told_at_once(stub, serve) -> None:
    workers = await slow(stub, 1, 6.0)
    served = await serve(*workers, **SMALL)
    first = [asyncio.create_task(ask(served.url, CHAT, chat(f"{n}"))) for n in range(2)]
    await eventually(lambda: sum(counts(workers)) == 2)
    begun = Stopwatch()
    reply = await ask(served.url, CHAT, chat("hurried"), ("x-headwater-timeout", "1"))
    assert begun.seconds() < 4.0
    check_error(reply, 503)
    assert reply.header("retry-after") is not None
    assert await total(served.admin, "headwater_shed_total", reason="deadline") == 1
    assert "hurried" not in texts(workers)
    for task in first:
        task.cancel()


async def test_nobody_waits_longer_than_configured(stub, serve) -> None:
    workers = await slow(stub, 1, 4.0)
    served = await serve(*workers, **{**SMALL, "admission.queue_s": 0.5})
    replies = await asyncio.gather(*(ask(served.url, CHAT, chat(f"{n}")) for n in range(3)))
    assert sorted(reply.status for reply in replies) == [200, 200, 503]
    assert await total(served.admin, "headwater_shed_total", reason="queue_timeout") == 1


async def test_a_client_that_leaves_frees_its_place(stub, serve, dial) -> None:
    end = asyncio.Event()
    workers = await slow(stub, 1, end)
    served = await serve(*workers, **{**SMALL, "admission.queue": 1})
    first = [asyncio.create_task(ask(served.url, CHAT, chat(f"{n}"))) for n in range(2)]
    await eventually(lambda: sum(counts(workers)) == 2)
    client = await dial(served.url)
    await client.send("POST", CHAT, json.dumps(chat("leaves")).encode())
    await waiting(served.admin, 1)
    client.abort()
    await waiting(served.admin, 0)
    stays = asyncio.create_task(ask(served.url, CHAT, chat("stays")))
    await waiting(served.admin, 1)
    end.set()
    assert (await stays).status == 200
    await asyncio.gather(*first)
    assert texts(workers)[2:] == ["stays"]
    assert set((await inflight(served.admin)).values()) == {0.0}


async def test_a_worker_that_comes_takes_those_who_wait(stub, serve) -> None:
    slow_one = (await slow(stub, 1, asyncio.Event()))[0]
    quick = await stub()
    served = await serve(slow_one, **SMALL)
    tasks = [asyncio.create_task(ask(served.url, CHAT, chat(f"{n}"))) for n in range(5)]
    await waiting(served.admin, 3)
    begun = Stopwatch()
    async with httpx.AsyncClient(trust_env=False) as client:
        added = await client.post(f"{served.admin}/admin/workers", json={"url": quick.url})
        assert added.status_code == 200
    await eventually(lambda: counts([quick]) == [3], 4.0)
    assert begun.seconds() < 4.0
    for task in tasks:
        task.cancel()
