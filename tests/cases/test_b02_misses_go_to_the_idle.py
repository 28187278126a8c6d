"""B02: what nobody has cached goes to the idlest worker, not to the emptiest index."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from cachestub import Engine, asked, post, shares, words
from caserig import COMPLETIONS, counts, piece
from dialoguekit import ROUTES, events_of, opening
from rig import CHAT, HANG, ROLE, SSE_HEAD, chunk, event, eventually

STUCK = ("silent", "head", "role", "content")


def stuck_script(path: str, how: str) -> list[Any]:
    """An answer of the route that goes no further than that."""
    if path in ROUTES:
        begun = opening(path, "id")
        said = events_of(path, "id", None)[: len(begun) + 1]
    else:
        begun, said = [ROLE], [ROLE, event(piece(path, "a"))]
    told = {"silent": [], "head": [], "role": begun, "content": said}[how]
    return [*([] if how == "silent" else [SSE_HEAD]), *map(chunk, told), HANG]


async def hang(dial: Any, served: Any, n: int, model: str, path: str, stream: bool) -> None:
    """So many requests with unique prompts that only S1 can take, and that never end."""
    for number in range(n):
        client = await dial(served.url)
        body = {**asked(path, words(200, 9000 + number), stream=stream), "model": model}
        await client.send("POST", path, json.dumps(body).encode())
    await eventually(lambda: counts(served.stubs)[0] == n)


@pytest.mark.parametrize("how", STUCK)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, *ROUTES])
async def test_misses_leave_a_stuck_worker_alone(stub, serve, dial, how: str, path: str) -> None:
    """S1 hangs with 20 requests and an empty index; S2 is idle and known to hold much."""
    stuck, idle = await stub(("m", "only")), await stub(("m",))
    engine = Engine(idle, slots=50, service_s=0.01)
    served = await serve(stuck, idle)
    big = words(4000, 1)
    stuck.healthy = False
    await eventually(lambda: _state(served, stuck) == "down")
    for n in range(4):
        assert await post(served.url, big + words(100, n), path) == idle.id
    stuck.healthy = True
    await eventually(lambda: _state(served, stuck) == "ready")
    stuck.plays(stuck_script(path, how))
    await hang(dial, served, 20, "only", path, stream=True)
    for n in range(50):
        client = await dial(served.url)
        body = asked(path, words(300, 500 + n), stream=how == "content")
        await client.send("POST", path, json.dumps(body).encode())
        await eventually(lambda n=n: sum(counts(served.stubs)) == 24 + n + 1)
    assert counts(served.stubs)[1] - 4 >= 45, counts(served.stubs)
    assert len(engine.served) == counts(served.stubs)[1]


def _state(served: Any, one: Any) -> str:
    now = asyncio.get_running_loop().time()
    return next(str(w.state) for w in served.gateway.router.workers(now) if w.id == one.id)


async def test_a_new_worker_does_not_attract_every_miss(stub, serve) -> None:
    """Three workers know much, a fourth has just been started: misses are spread by load."""
    stubs = [await stub() for _ in range(4)]
    engines = [Engine(one, slots=4, service_s=0.15) for one in stubs]
    served = await serve(*stubs)
    engines[3].stub.healthy = False
    await eventually(lambda: _state(served, stubs[3]) == "down")
    for n in range(60):
        await post(served.url, words(400, n), CHAT)
        if n == 3:
            for engine in engines:
                engine.service_s = 0.0
    for engine in engines:
        engine.service_s = 0.15
    stubs[3].healthy = True
    await eventually(lambda: _state(served, stubs[3]) == "ready")
    workers = await asyncio.gather(
        *(post(served.url, words(400, 1000 + n), CHAT) for n in range(40))
    )
    got = shares(workers, stubs)
    assert all(6 <= share <= 14 for share in got), got


async def test_a_worker_that_loses_its_cache_does_not_attract_every_miss(stub, serve) -> None:
    """The same for one that restarted: an empty index is no reason to prefer it."""
    stubs = [await stub() for _ in range(4)]
    for one in stubs:
        Engine(one, slots=4, service_s=0.0)
    served = await serve(*stubs)
    for n in range(40):
        await post(served.url, words(400, n), CHAT)
    await stubs[0].stop()
    await eventually(lambda: _state(served, stubs[0]) == "down", 10)
    await stubs[0].listen()
    await eventually(lambda: _state(served, stubs[0]) == "ready", 10)
    for one in stubs:
        Engine(one, slots=4, service_s=0.15)
    workers = await asyncio.gather(
        *(post(served.url, words(400, 2000 + n), CHAT) for n in range(40))
    )
    got = shares(workers, stubs)
    assert all(6 <= share <= 14 for share in got), got
