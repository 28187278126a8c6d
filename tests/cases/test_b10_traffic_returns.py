"""B10, its last sentence: a worker that failed and is well again gets traffic without a restart."""

from __future__ import annotations

import asyncio

from caserig import Clogged, counts
from rig import CHAT, Stub, ask, chat, completion, eventually, plain
from stopwatch import Limit


async def gets_some(served, one: Stub, within_s: float) -> None:
    """Single requests on an idle fleet reach the worker again."""
    limit, before, n = Limit(within_s), len(one.seen), 0
    while len(one.seen) == before:
        assert not limit.over(), "it never gets a request again"
        n += 1
        reply = await ask(served.url, CHAT, chat(f"{n} again {n * 31}"))
        assert reply.status == 200
        await asyncio.sleep(0.02)


async def test_after_a_failure_that_did_not_put_it_to_rest(stub, serve) -> None:
    one, two = await stub(), await stub()
    served = await serve(one, two)
    one.plays(plain(b"x", 500), completion())
    two.plays(completion())
    for n in range(100):
        await ask(served.url, CHAT, chat(f"{n} until it failed {n * 31}"))
        if one.seen:
            break
    assert counts([one]) == [1]
    await gets_some(served, one, 15.0)


async def test_after_a_black_hole(stub, serve) -> None:
    one, two = await stub(), await stub()
    served = await serve(
        one, two, **{"workers.health_timeout_s": 1.0, "workers.connect_timeout_s": 1.0}
    )
    await one.stop()
    hole = Clogged(one.port)
    for n in range(12):
        reply = await ask(served.url, CHAT, chat(f"{n} meanwhile {n * 31}"))
        assert reply.status == 200
    hole.close()
    await one.listen()
    await eventually(lambda: not any(w.reason for w in served.gateway.router.workers(0.0)))
    await gets_some(served, one, 8.0)
