"""Workers that say odd things of themselves: they are left out with a reason, or harmless."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from rig import CHAT, Script, Seen, Stub, answer, ask, chat, eventually

INFO: dict[str, Any] = {"id": "w", "epoch": 5, "url": "http://x", "models": ["m"]}


class Native(Stub):
    """A stub that answers like a worker of our own make."""

    info: dict[str, Any]
    load: dict[str, Any]

    def probe(self, seen: Seen) -> Script:
        if seen.target == "/headwater/info":
            return answer({**INFO, **self.info})
        if seen.target == "/headwater/load":
            return answer(self.load)
        return super().probe(seen)


async def native(info: dict[str, Any], load: dict[str, Any] | None = None) -> Native:
    made = Native()
    made.info, made.load = {**info, "event_feed": False}, load or {}
    await made.listen()
    return made


@pytest.mark.parametrize(
    "info",
    [
        {"id": "a\r\nX: y"},
        {"id": "a\x00b"},
        {"id": "a\x7fb"},
        {"id": ""},
        {"id": "x" * 257},
        {"block_size": 0},
        {"block_size": -16},
        {"blocks_total": -1},
        {"max_model_len": -1},
    ],
)
async def test_what_cannot_be_worked_with_stays_outside_and_says_why(stub, serve, info) -> None:
    odd, good = await native(info), await stub()
    try:
        served = await serve(good, **{"workers.urls": f"{odd.url},{good.url}"})
        notes = await eventually(
            lambda: [n for n in served.gateway.feeds.strangers() if "/headwater/info" in n]
        )
        assert odd.url in notes[0]
        for _ in range(5):
            assert (await ask(served.url, CHAT, chat())).status == 200
        assert odd.seen == []
        assert [w.id for w in served.gateway.router.workers(0.0)] == [good.id]
    finally:
        await odd.stop()


@pytest.mark.parametrize(
    "load",
    [
        {"running": -5, "waiting": -5, "queued_prefill_tokens": -1000},
        {"running": 2**62, "queued_prefill_tokens": 2**62},
        {"prefill_tokens_per_s": -5.0, "decode_tokens_per_s": -5.0},
        {"prefill_tokens_per_s": 1e-300, "queued_prefill_tokens": 1000},
        {"blocks_used": 10**9, "blocks_total": -1},
    ],
)
async def test_odd_loads_fail_no_request(stub, serve, load) -> None:
    odd, good = await native({}, load), await stub()
    try:
        served = await serve(good, **{"workers.urls": f"{odd.url},{good.url}"})
        await eventually(lambda: len(served.gateway.router.workers(0.0)) == 2)
        for _ in range(8):
            assert (await ask(served.url, CHAT, chat())).status == 200
        for path in ("/metrics", "/admin/workers"):
            assert (await ask(served.admin, path)).status == 200
        assert (await ask(served.admin, "/admin/explain", chat())).status == 200
    finally:
        await odd.stop()


@pytest.mark.parametrize(
    "name", ["a/drain", "a b", "w\u00f6rker\U0001f30d", "a%2Fb", "a/undrain/x", "?#"]
)
async def test_any_printable_id_can_be_drained_and_removed(serve, name) -> None:
    odd = await native({"id": name})
    try:
        served = await serve(**{"workers.urls": odd.url})

        def states() -> dict[str, str]:
            return {str(w.id): w.state.value for w in served.gateway.router.workers(0.0)}

        await eventually(lambda: states() == {name: "ready"})
        assert (await ask(served.url, CHAT, chat())).status == 200
        target = f"/admin/workers/{quote(name, safe='')}"
        for action, state in (("drain", "draining"), ("undrain", "ready")):
            assert (await ask(served.admin, f"{target}/{action}", b"")).json["worker"] == name
            assert states() == {name: state}
        assert (await ask(served.admin, target, method="DELETE")).status == 200
        assert states() == {}
    finally:
        await odd.stop()
