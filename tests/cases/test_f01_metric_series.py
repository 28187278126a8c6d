"""F01: what clients make up makes no series.

Scaled: 300 of each kind instead of 10,000; a second 300 must not add a single one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from caserig import body_for, metrics
from rig import CHAT, ask, completion


async def storm(served: Any, first: int) -> None:
    """300 random models, paths, users and methods, so many at a time."""

    async def one(n: int) -> None:
        await ask(served.url, CHAT, {**body_for(CHAT, "x"), "model": f"model-{n}"})
        await ask(served.url, f"/v1/path-{n}", {"model": "m"})
        await ask(served.url, f"/path-{n}")
        await ask(served.url, CHAT, body_for(CHAT, "x", user=f"user-{n}"))
        await ask(served.url, CHAT, body_for(CHAT, "x"), ("x-headwater-session", f"s-{n}"))
        await ask(served.url, CHAT, body_for(CHAT, "x"), ("x-headwater-policy", f"p-{n}"))
        await ask(served.url, CHAT, body_for(CHAT, "x"), ("x-headwater-priority", f"{n}"))
        await ask(served.url, "/v1/models", None, method=f"METHOD{n % 30}X")

    for start in range(first, first + 300, 30):
        await asyncio.gather(*(one(n) for n in range(start, start + 30)))


async def test_series_stay_as_many(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker, **{"routing.allow_policy_header": True})
    worker.plays(completion())
    await ask(served.url, CHAT, body_for(CHAT, "x"))
    before = set(await metrics(served.admin))
    await storm(served, 0)
    between = set(await metrics(served.admin))
    names = {name for name, _ in between - before}
    fresh = {dict(labels).get("model") for _, labels in between} - {None}
    assert not any(str(model).startswith("model-") for model in fresh)
    for _, labels in between:
        for value in dict(labels).values():
            assert not value.startswith(("path-", "user-", "s-", "p-", "METHOD", "/path"))
    assert names
    await storm(served, 300)
    assert set(await metrics(served.admin)) - between == set()
