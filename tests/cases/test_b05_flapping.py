"""B05: the load of a worker that leaves and comes back never falls below zero.

Scaled: the streams run until the test lets them end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from caserig import inflight, settles, shares_of
from rig import CHAT, DONE, END, ROLE, SSE_HEAD, STOP, Reply, Stub, ask, chat, chunk, delta


def lasting(until: asyncio.Event) -> list[Any]:
    """A stream that lasts until then."""
    return [SSE_HEAD, chunk(ROLE + delta("a")), until, chunk(STOP + DONE), END]


class Gauge:
    """Watches the in-flight gauge of one worker all the time."""

    def __init__(self, admin: str, worker: str) -> None:
        self.admin, self.worker = admin, worker
        self.seen: list[float] = []
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.01)

    async def look(self) -> float | None:
        """Its value now; None while the worker is not listed."""
        value = (await inflight(self.admin)).get(self.worker)
        if value is not None:
            self.seen.append(value)
        return value

    def stop(self) -> None:
        """No more looks."""
        self._task.cancel()


async def states(admin: str, worker: str) -> str:
    """State of one worker; empty if it is not listed."""
    listed = (await ask(admin, "/admin/workers")).json["workers"]
    return next((each["state"] for each in listed if each["id"] == worker), "")


async def becomes(admin: str, worker: str, *wanted: str) -> None:
    """Wait for a state."""

    async def so() -> bool:
        return await states(admin, worker) in wanted

    await settles(so, 20.0)


async def by_health(served, one: Stub) -> None:
    """Its health page fails, then passes."""
    one.healthy = False
    await becomes(served.admin, one.id, "down")
    one.healthy = True
    await becomes(served.admin, one.id, "ready")


async def by_operator(served, one: Stub) -> None:
    """Taken out and put back."""
    assert (await ask(served.admin, f"/admin/workers/{one.id}", method="DELETE")).status == 200
    assert await states(served.admin, one.id) == ""
    assert (await ask(served.admin, "/admin/workers", {"url": one.url})).status == 200
    await becomes(served.admin, one.id, "ready")


async def by_draining(served, one: Stub) -> None:
    """Drained and undrained."""
    await ask(served.admin, f"/admin/workers/{one.id}/drain", {})
    await becomes(served.admin, one.id, "draining")
    await ask(served.admin, f"/admin/workers/{one.id}/undrain", {})
    await becomes(served.admin, one.id, "ready")


async def by_hanging(served, one: Stub) -> None:
    """Its probes get no answer for a while."""
    one.frozen = True
    await becomes(served.admin, one.id, "down")
    one.frozen = False
    await becomes(served.admin, one.id, "ready")


FLAPS: dict[str, Callable[..., Awaitable[None]]] = {
    "health": by_health,
    "operator": by_operator,
    "drain": by_draining,
    "hang": by_hanging,
}


@pytest.mark.parametrize("how", FLAPS)
async def test_it_leaves_and_comes_back(stub, serve, how) -> None:
    """S1 alone also serves "only", so that requests can be sent to it."""
    workers = [await stub(("m", "only")), *[await stub(("m",)) for _ in range(3)]]
    one = workers[0]
    limits = {"workers.health_timeout_s": 1.0} if how == "hang" else {}
    served = await serve(*workers, **limits)
    let_go = asyncio.Event()
    one.respond = lambda seen: lasting(let_go)
    running: list[asyncio.Task[Reply]] = []

    def start(n: int, what: str) -> None:
        for number in range(n):
            body = {**chat(f"{number} {what} {number * 31}", stream=True), "model": "only"}
            running.append(asyncio.create_task(ask(served.url, CHAT, body)))

    gauge = Gauge(served.admin, one.id)

    async def count_is(n: int) -> None:
        async def so() -> bool:
            return await gauge.look() == n

        await settles(so, 20.0)

    start(10, "before")
    await count_is(10)
    for _ in range(2):
        await FLAPS[how](served, one)
    await count_is(10)
    start(5, "after")
    await count_is(15)
    let_go.set()
    replies = await asyncio.gather(*running)
    assert all(reply.events[-1] == "[DONE]" for reply in replies)
    await count_is(0)
    gauge.stop()
    assert min(gauge.seen) >= 0
    assert max(gauge.seen) == 15
    for worker in workers:
        await becomes(served.admin, worker.id, "ready")
    shares = await shares_of(
        workers, lambda n: ask(served.url, CHAT, chat(f"{n} unique {n * 7919}")), 40
    )
    assert all(7 <= share <= 13 for share in shares), shares


async def test_streams_that_end_while_it_is_away(stub, serve) -> None:
    workers = [await stub(("m", "only")), *[await stub(("m",)) for _ in range(3)]]
    one = workers[0]
    served = await serve(*workers)
    let_go = asyncio.Event()
    one.respond = lambda seen: lasting(let_go)
    gauge = Gauge(served.admin, one.id)
    body = {**chat(stream=True), "model": "only"}
    running = [asyncio.create_task(ask(served.url, CHAT, body)) for _ in range(10)]

    async def ten() -> bool:
        return await gauge.look() == 10

    await settles(ten, 10.0)
    one.healthy = False
    await becomes(served.admin, one.id, "down")
    let_go.set()
    replies = await asyncio.gather(*running)
    assert all(reply.events[-1] == "[DONE]" for reply in replies)
    assert await gauge.look() == 0
    one.healthy = True
    await becomes(served.admin, one.id, "ready")
    gauge.stop()
    assert min(gauge.seen) == 0
    shares = await shares_of(
        workers, lambda n: ask(served.url, CHAT, chat(f"{n} unique {n * 7919}")), 40
    )
    assert all(7 <= share <= 13 for share in shares), shares


async def test_it_dies_with_its_streams_and_starts_again(stub, serve) -> None:
    workers = [await stub(("m", "only")), *[await stub(("m",)) for _ in range(3)]]
    one = workers[0]
    served = await serve(*workers)
    gauge = Gauge(served.admin, one.id)
    for _ in range(3):
        one.respond = lambda seen: lasting(asyncio.Event())
        body = {**chat(stream=True), "model": "only"}
        running = [asyncio.create_task(ask(served.url, CHAT, body)) for _ in range(10)]

        async def ten() -> bool:
            return await gauge.look() == 10

        await settles(ten, 10.0)
        await one.stop()
        replies = await asyncio.gather(*running)
        assert all("error" in reply.events[-1] for reply in replies)
        assert await gauge.look() == 0
        await one.listen()
        await becomes(served.admin, one.id, "ready")
    gauge.stop()
    assert min(gauge.seen) == 0
