"""B22: a worker that comes or goes moves nobody else's prefixes.

Stubs without cache events behind two gateways on one Redis: what is warm where is only learned, and
each gateway has answered but a part of the requests. Scaled: 60 prefixes instead of 200.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from caserig import settles, total
from dialoguekit import ROUTES, Counts, rendered, request, told, usage_of
from rig import CHAT, Stub, ask, chat, completion, eventually, usage

N = 60
AT_ONCE = 6
PATIENT = {"redis.timeout_ms": 10_000}
"""A busy machine is no outage."""
pytestmark = pytest.mark.redis
every_route = pytest.mark.parametrize("route", [CHAT, *ROUTES])


def prompt(route: str, number: int, turn: int) -> dict:
    """A prefix of about 1,500 characters, and something new behind it."""
    rng = random.Random(f"B22 {number}")
    shared = "".join(rng.choices("abcdefghijklmnop qrst", k=1500))
    said = f"{shared} {turn} {rng.random()}"
    return chat(said) if route == CHAT else request(route, [("user", said)], parts=True)


def said_in(route: str, body: dict) -> str:
    """The same text, as a worker reads it."""
    return str(body["messages"][0]["content"]) if route == CHAT else rendered(body).decode()


class Fleet:
    """Stubs that report what they hold like an engine with a cache, and gateways before them."""

    def __init__(self, served: list, route: str) -> None:
        self.served, self.route = served, route
        self.warm: dict[int, str] = {}

    @staticmethod
    def equip(stub: Stub, route: str) -> None:
        seen: set[str] = set()

        def respond(request):
            text = said_in(route, request.json)[:1500]
            known = 384 if text in seen else 0
            seen.add(text)
            if route == CHAT:
                return [0.02, *completion(usage=usage(400, 3, known))]
            return [0.02, *told(route, False, "id_1", usage_of(route, Counts(400, known)))]

        stub.respond = respond

    async def send(self, number: int, turn: int, gateway: int) -> tuple[str, int]:
        reply = await ask(self.served[gateway].url, self.route, prompt(self.route, number, turn))
        assert reply.status == 200, reply.body
        return (
            reply.header("x-headwater-worker") or "",
            int(reply.header("x-headwater-matched-tokens") or 0),
        )

    async def round(self, turn: int, gateway) -> dict[int, str]:
        """Each prefix once, a few at a time; ``gateway(number)`` says through which."""
        placed: dict[int, str] = {}
        order = random.Random(turn).sample(range(N), N)
        for start in range(0, N, AT_ONCE):
            some = order[start : start + AT_ONCE]
            sent = await asyncio.gather(*(self.send(n, turn, gateway(n)) for n in some))
            placed |= {n: worker for n, (worker, _) in zip(some, sent, strict=True)}
        return placed


async def agree(fleet: Fleet) -> None:
    """All that one gateway has learned is known to the other."""

    async def heard() -> bool:
        facts = [each.gateway.feeds.stats.learned_from_peers for each in fleet.served]
        return sum(facts) >= len(fleet.warm)

    await settles(heard, 10)


@every_route
async def test_a_worker_that_joins_or_leaves_moves_only_its_own(
    serve, stub, redis_server_factory, route: str
) -> None:
    server = redis_server_factory("newest")
    stubs = [await stub() for _ in range(4)]
    for each in stubs:
        Fleet.equip(each, route)
    served = [await serve(*stubs, **{"redis.url": server.url}, **PATIENT) for _ in range(2)]
    for each in served:
        await eventually(lambda each=each: each.gateway.feeds.stats.redis_up, 10)
    fleet = Fleet(served, route)

    # Warmed half through one gateway, half through the other.
    fleet.warm = await fleet.round(0, lambda n: n % 2)
    assert len(set(fleet.warm.values())) == 4
    await agree(fleet)

    # Each asks the gateway that has never seen it.
    placed = await fleet.round(1, lambda n: 1 - n % 2)
    assert sum(placed[n] == fleet.warm[n] for n in range(N)) >= 0.95 * N

    fifth = await stub()
    Fleet.equip(fifth, route)
    for each in served:
        added = await ask(each.admin, "/admin/workers", {"url": fifth.url})
        assert added.status in (200, 201), added.body
        await settles(
            lambda each=each: total(each.admin, "headwater_worker_state", worker=fifth.id), 10
        )
    placed = await fleet.round(2, lambda n: n % 2)
    assert sum(placed[n] == fleet.warm[n] for n in range(N)) >= 0.9 * N
    fleet.warm = placed

    gone = stubs[0].id
    for each in served:
        assert (await ask(each.admin, f"/admin/workers/{gone}/drain", {})).status == 200
    placed = await fleet.round(3, lambda n: n % 2)
    stayed = [n for n in range(N) if fleet.warm[n] != gone]
    assert sum(placed[n] == fleet.warm[n] for n in stayed) >= 0.95 * len(stayed)
    moved = [placed[n] for n in range(N) if fleet.warm[n] == gone]
    assert gone not in moved
    assert len(set(moved)) >= 2


@every_route
async def test_a_gateway_that_starts_late_is_not_blind(
    serve, stub, redis_server_factory, route: str
) -> None:
    server = redis_server_factory("oldest")
    stubs = [await stub() for _ in range(3)]
    for each in stubs:
        Fleet.equip(each, route)
    first = await serve(*stubs, **{"redis.url": server.url}, **PATIENT)
    await eventually(lambda: first.gateway.feeds.stats.redis_up, 10)
    fleet = Fleet([first], route)
    fleet.warm = await fleet.round(0, lambda n: 0)
    await settles(lambda: _written(server), 20)
    await first.gateway.close()
    late = await serve(*stubs, **{"redis.url": server.url}, **PATIENT)
    fleet.served = [late]
    await agree(fleet)
    placed = {n: await fleet.send(n, 1, 0) for n in range(N)}
    assert sum(placed[n][0] == fleet.warm[n] for n in range(N)) >= 0.95 * N
    assert sum(matched > 0 for _, matched in placed.values()) >= 0.95 * N


async def _written(server) -> bool:
    from redis.asyncio import Redis

    async with Redis.from_url(server.url) as redis:
        names = [name async for name in redis.scan_iter("hw:*:learned")]
        return sum([await redis.xlen(name) for name in names]) == N
