"""A worker that hangs keeps no request that another could answer, and loses none that began."""

from __future__ import annotations

import asyncio

import httpx
from rig import CHAT, HANG, Stub, completion, delta, eventually, stream

from gateway.feeds.members import SILENT_PROBES

PROBE_S = 0.4
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
QUICK = {"workers.health_timeout_s": PROBE_S, "routing.policy": "round_robin"}


async def asked_of(hung: Stub, url: str, client: httpx.AsyncClient) -> asyncio.Task[httpx.Response]:
    """A request that the stub has got."""
    while True:
        before = len(hung.seen)
        asking = asyncio.create_task(client.post(f"{url}{CHAT}", json=BODY))
        await eventually(lambda a=asking, n=before: a.done() or len(hung.seen) > n, 20.0)
        if len(hung.seen) > before:
            return asking
        await asking


async def test_what_a_hung_worker_has_not_begun_to_answer_goes_to_another(stub, serve) -> None:
    hung, well = await stub(), await stub()
    served = await serve(hung, well, **QUICK)
    hung.plays([HANG])
    well.plays(completion())
    async with httpx.AsyncClient(timeout=30) as client:
        asking = await asked_of(hung, served.url, client)
        hung.frozen = True
        answer = await asking
    assert answer.status_code == 200
    assert answer.headers["x-headwater-worker"] == well.id
    assert answer.headers["x-headwater-attempts"] == "2"
    await eventually(lambda: served.inflight() == 0)


async def test_with_nobody_else_there_it_is_waited_for(stub, serve) -> None:
    hung = await stub()
    served = await serve(hung, **QUICK)
    pause = PROBE_S * (SILENT_PROBES + 3)
    hung.plays([pause, *completion()])
    async with httpx.AsyncClient(timeout=30) as client:
        asking = await asked_of(hung, served.url, client)
        hung.frozen = True
        answer = await asking
    assert answer.status_code == 200
    assert answer.headers["x-headwater-attempts"] == "1"


async def test_a_stream_that_began_is_not_cut(stub, serve) -> None:
    hung, well = await stub(), await stub()
    served = await serve(hung, well, **QUICK)
    pause = PROBE_S * (SILENT_PROBES + 3)
    first, *rest = stream(delta("a"), delta("b"), gap_s=0.0)
    hung.plays([first, *rest[:2], pause, *rest[2:]])
    well.plays(stream(delta("other")))
    async with httpx.AsyncClient(timeout=30) as client:
        while not hung.seen:
            text = ""
            async with client.stream(
                "POST", f"{served.url}{CHAT}", json={**BODY, "stream": True}
            ) as answer:
                hung.frozen = bool(hung.seen)
                async for line in answer.aiter_lines():
                    text += line
    assert hung.seen[0].done
    assert '"a"' in text
    assert '"b"' in text
    assert "error" not in text


async def test_it_is_given_up_once_however_often_that_is_told(stub, serve) -> None:
    hung, well = await stub(), await stub()
    served = await serve(hung, well, **QUICK)
    hung.plays([HANG])
    well.plays(completion())
    pipeline = served.gateway.pipeline
    async with httpx.AsyncClient(timeout=30) as client:
        asking = await asked_of(hung, served.url, client)
        for _ in range(20):
            pipeline.give_up(hung.id)
            await asyncio.sleep(0)
        answer = await asking
        pipeline.give_up(hung.id)
    assert answer.headers["x-headwater-worker"] == well.id
    await eventually(lambda: served.inflight() == 0)
