"""F03: a worker that is drained finishes what it has and gets nothing new, its prefixes neither."""

from __future__ import annotations

import asyncio

from cachestub import Engine, post, words
from caserig import body_for, counts, settles
from rig import CHAT, DONE, END, ROLE, SSE_HEAD, STOP, ask, chunk, delta, eventually


async def test_a_drained_worker_finishes_and_is_left_alone(stub, serve) -> None:
    stubs = [await stub(("m", "only")), await stub(("m",))]
    for one in stubs:
        Engine(one, service_s=0.0)
    served = await serve(*stubs)
    prefix = ""
    for seed in range(100):
        prefix = words(400, seed)
        if await post(served.url, prefix) == stubs[0].id:
            break
    assert await post(served.url, prefix) == stubs[0].id
    gate = [SSE_HEAD, chunk(ROLE + delta("a")), 1.0, chunk(delta("b") + STOP + DONE), END]
    stubs[0].respond = lambda seen: gate
    body = {**body_for(CHAT, "x", stream=True), "model": "only"}
    running = [asyncio.create_task(ask(served.url, CHAT, body)) for _ in range(5)]
    before = counts(stubs)[0]
    await eventually(lambda: counts(stubs)[0] == before + 5)
    drained = await ask(served.admin, f"/admin/workers/{stubs[0].id}/drain", {})
    assert drained.status == 200
    for n in range(10):
        assert await post(served.url, prefix + words(5, n)) == stubs[1].id
    assert counts(stubs)[0] == before + 5
    replies = await asyncio.gather(*running)
    assert [reply.text for reply in replies] == ["ab"] * 5
    assert (await ask(served.admin, f"/admin/workers/{stubs[0].id}", method="DELETE")).status == 200
    listed = (await ask(served.admin, "/admin/workers")).json["workers"]
    assert [each["id"] for each in listed] == [stubs[1].id]
    models = (await ask(served.url, "/v1/models")).json["data"]
    assert [card["id"] for card in models] == ["m"]
    assert stubs[0].id.encode() not in (await ask(served.admin, "/metrics")).body
    Engine(stubs[0], service_s=0.0)
    assert (await ask(served.admin, "/admin/workers", {"url": stubs[0].url})).status == 200

    async def back() -> bool:
        listed = (await ask(served.admin, "/admin/workers")).json["workers"]
        return sorted(each["state"] for each in listed) == ["ready", "ready"]

    await settles(back, 10)
    again = await ask(served.url, CHAT, {**body_for(CHAT, "y"), "model": "only"})
    assert again.status == 200
