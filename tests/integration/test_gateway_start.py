"""From when on a gateway that was just started is ready: not with the first worker that answers."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest
from rig import CHAT, Script, Seen, Stub, eventually
from stopwatch import Stopwatch

from gateway.config import WorkersConfig
from gateway.feeds.feeds import FIRST_PROBES_S

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PATIENT = {"workers.health_timeout_s": 30}


def answers_probes_late(stub: Stub, pause_s: float) -> None:
    at_once = stub.probe

    def late(seen: Seen) -> Script:
        return [pause_s, *at_once(seen)]

    stub.probe = late  # type: ignore[method-assign]


async def burst(url: str, requests: int) -> Counter[str]:
    """Who answers requests that come all at once."""
    async with httpx.AsyncClient(timeout=30) as client:
        asked = (client.post(f"{url}{CHAT}", json=BODY) for _ in range(requests))
        answers = await asyncio.gather(*asked)
    return Counter(answer.headers["x-headwater-worker"] for answer in answers)


async def test_a_burst_behind_the_start_is_spread_over_all_that_are_well(stub, serve) -> None:
    stubs = [await stub() for _ in range(3)]
    for number, one in enumerate(stubs):
        answers_probes_late(one, 0.1 * number)
        one.respond = lambda seen: [0.2, *Stub().script_for(seen)]
    served = await serve(*stubs, wait=False, **PATIENT)
    await served.gateway.until_ready()
    used = await burst(served.url, 21)
    assert used.keys() == {one.id for one in stubs}


async def test_ready_names_whose_first_probe_is_under_way(stub, serve) -> None:
    early, late = await stub(), await stub()
    answers_probes_late(late, 0.2)
    served = await serve(early, late, wait=False, **PATIENT)
    await eventually(lambda: served.gateway.router.ready()[0])
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{served.url}/ready")
        assert answer.status_code == 503
        assert answer.json()["reasons"][0] == f"worker {late.url}: its first probe is under way"
        # Whoever asks all the same is answered.
        assert (await client.post(f"{served.url}{CHAT}", json=BODY)).status_code == 200
        await served.gateway.until_ready()
        assert (await client.get(f"{served.url}/ready")).status_code == 200


@pytest.mark.parametrize("how", ["refuses", "says nothing", "is ill"])
async def test_a_worker_that_is_dead_keeps_nobody_waiting(stub, serve, how: str) -> None:
    well, dead = await stub(), await stub()
    if how == "refuses":
        await dead.stop()
    dead.frozen, dead.healthy = how == "says nothing", how != "is ill"
    watch = Stopwatch()
    served = await serve(well, dead, wait=False, **PATIENT)
    await served.gateway.until_ready()
    assert watch.seconds() < (FIRST_PROBES_S if how == "says nothing" else 0.0) + 5.0
    assert (await burst(served.url, 3)).keys() == {well.id}


async def test_a_worker_that_is_named_later_makes_nothing_unready(stub, serve) -> None:
    well, late = await stub(), await stub()
    late.frozen = True
    served = await serve(well, wait=False, **PATIENT)
    await served.gateway.until_ready()
    served.gateway.feeds.replace_static(WorkersConfig(urls=(well.url, late.url)))
    assert served.gateway.readiness().ready
