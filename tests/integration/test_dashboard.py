"""The dashboard: what it sends, to whom, and what a page may load."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from dashboardkit import Scene
from ledgerkit import hit, record
from rig import CHAT, RawClient, ask, chat, delta, eventually, raw_stream, usage_event

from gateway.dashboard.live import FAMILIES_KEPT, STEP_S, STEPS, Live
from gateway.dashboard.recent import CANDIDATES, KEPT, Recent
from gateway.records import TokenFlow

TERMS = ("requests", *TokenFlow.__struct_fields__)


async def first_state(url: str, *headers: tuple[str, str]) -> dict[str, Any]:
    """The first state of the stream."""
    client = await RawClient.connect(url)
    try:
        await client.send("GET", "/dashboard/events", None, *headers)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0], head
        assert b"text/event-stream" in head
        text = b""
        while b"\n\n" not in text:
            text += await anext(client.chunks())
        name, data = text.split(b"\n\n")[0].split(b"\n")
        assert name == b"event: state"
        return json.loads(data.removeprefix(b"data: "))  # type: ignore[no-any-return]
    finally:
        client.abort()


async def test_the_page_loads_nothing_from_elsewhere_and_runs_nothing_inline() -> None:
    scene = Scene(2, 5)
    async with scene.serve() as url:
        page = await ask(url, "/dashboard")
        assert page.status == 200
        policy = page.header("content-security-policy") or ""
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        text = page.body.decode()
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "style=" not in text
        assert "onclick" not in text
        for path, kind in (("app.js", "text/javascript"), ("app.css", "text/css")):
            assert f"/dashboard/{path}" in text
            part = await ask(url, f"/dashboard/{path}")
            assert (part.status, (part.header("content-type") or "").split(";")[0]) == (200, kind)
            assert "innerHTML" not in part.body.decode()
        assert (await ask(url, "/dashboard/../admin.py")).status == 404
        assert (await ask(url, "/dashboard/app.py")).status == 404


async def test_the_state_is_what_happened_and_its_sums_close() -> None:
    scene = Scene(4, 300)
    async with scene.serve() as url:
        state = await first_state(url)
    assert state["totals"]["requests"] == 300
    assert state["window"]["totals"] == state["totals"]
    for totals in (state["totals"], state["window"]["totals"]):
        assert tuple(totals) == TERMS
        TokenFlow(**{name: totals[name] for name in TERMS[1:]}).check()
    series = state["series"]
    assert len(series["requests"]) == STEPS
    assert sum(series["requests"]) == 300
    for name in TERMS[1:]:
        assert sum(series.get(name, [0])) == state["totals"][name]
    workers = {worker["id"]: worker for worker in state["workers"]}
    assert sorted(workers) == ["w1", "w2", "w3", "w4"]
    assert sum(worker["requests"] for worker in workers.values()) == 300
    assert all(worker["blocks_total"] == 2000 for worker in workers.values())
    assert sum(family["requests"] for family in state["families"]) == 300
    assert sum(state["reasons"].values()) == 300
    assert len(state["recent"]) == 40


async def test_a_hundred_workers_fit_a_small_message() -> None:
    scene = Scene(100, 200)
    async with scene.serve() as url:
        state = await first_state(url)
    assert len(state["workers"]) == 100
    assert len(json.dumps(state)) < 120_000


async def test_one_request_can_be_asked_for() -> None:
    scene = Scene(30, 20)
    name = scene.request()
    async with scene.serve() as url:
        (attempt,) = (await ask(url, f"/admin/requests/{name}")).json["attempts"]
        assert (await ask(url, "/admin/requests/req-none")).status == 404
        listed = (await ask(url, "/admin/requests")).json["requests"]
    assert listed[0]["id"] == name
    assert attempt["request"]["request_id"] == name
    assert attempt["workers"][0]["id"] == attempt["choice"] == attempt["request"]["worker"]
    assert (len(attempt["workers"]), attempt["candidates"]) == (CANDIDATES, 30)
    assert sum(attempt["workers"][0]["parts"].values()) == pytest.approx(
        attempt["workers"][0]["cost_s"]
    )
    assert attempt["choice"] in attempt["reason"]


async def test_with_a_token_everything_needs_it_and_browsers_can_give_it() -> None:
    scene = Scene(2, 3)
    async with scene.serve(token="s3cret") as url:
        for path in ("/dashboard", "/dashboard/app.js", "/dashboard/events", "/admin/requests"):
            reply = await ask(url, path)
            assert reply.status == 401, path
            kind = "Basic" if path.startswith("/dashboard") else "Bearer"
            assert (reply.header("www-authenticate") or "").startswith(kind)
        bearer = ("Authorization", "Bearer s3cret")
        basic = ("Authorization", "Basic " + base64.b64encode(b"me:s3cret").decode())
        for good in (bearer, basic):
            assert (await ask(url, "/dashboard", None, good)).status == 200
            assert (await first_state(url, good))["totals"]["requests"] == 3
        for bad in (
            "Basic " + base64.b64encode(b"me:wrong").decode(),
            "Basic !",
            "Basic",
            "Basic bWU=",
        ):
            assert (await ask(url, "/dashboard", None, ("Authorization", bad))).status == 401
        # a browser sends what it was told once for pages of other sites too
        foreign = ("Origin", "http://evil.example")
        assert (await ask(url, "/admin/requests", None, basic, foreign)).status == 403
        crossed = ("Sec-Fetch-Site", "cross-site")
        assert (await ask(url, "/dashboard/events", None, basic, crossed)).status == 403
        assert (await ask(url, "/admin/requests", None, bearer, crossed)).status == 200


async def test_without_a_token_other_sites_get_nothing_but_may_link_to_it() -> None:
    scene = Scene(2, 3)
    crossed, link = ("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate")
    async with scene.serve() as url:
        assert (await ask(url, "/dashboard/events", None, crossed)).status == 403
        assert (await ask(url, "/dashboard/events", None, crossed, link)).status == 403
        assert (await ask(url, "/dashboard", None, crossed)).status == 403
        assert (await ask(url, "/dashboard", None, crossed, link)).status == 200


async def test_watchers_are_few_share_a_state_and_are_let_go(monkeypatch) -> None:
    from gateway.dashboard import pages

    monkeypatch.setattr(pages, "MOST_WATCHERS", 2)
    scene = Scene(2, 3)
    async with scene.serve() as url:
        clients = [await RawClient.connect(url) for _ in range(2)]
        for client in clients:
            await client.send("GET", "/dashboard/events")
            await client.reader.readuntil(b"\n\n")
        assert (await ask(url, "/dashboard/events")).status == 503
        clients[0].abort()

        async def again() -> bool:
            client = await RawClient.connect(url)
            await client.send("GET", "/dashboard/events")
            head = await client.reader.readuntil(b"\r\n\r\n")
            client.abort()
            return b" 200 " in head

        async with asyncio.timeout(20):
            while not await again():  # noqa: ASYNC110 - the server says it, not an event
                await asyncio.sleep(0.05)
        clients[1].abort()


async def test_a_real_gateway_shows_its_requests(stub, serve) -> None:
    worker = await stub()
    served = await serve(worker)
    worker.plays(raw_stream(delta("a"), usage_event(40, 3, 32), b"data: [DONE]\n\n"))
    reply = await ask(served.url, CHAT, chat("x", stream=True), ("x-request-id", "mine-1"))
    assert reply.status == 200
    await eventually(lambda: served.inflight() == 0)
    state = await first_state(served.admin)
    assert state["totals"]["requests"] == 1
    assert state["totals"]["delivered"] == 32
    (attempt,) = (await ask(served.admin, "/admin/requests/mine-1")).json["attempts"]
    assert attempt["request"]["client_id"] == "mine-1"
    assert attempt["reason"].endswith("was the only worker that could take it")


def test_old_steps_are_forgotten_but_not_in_the_totals() -> None:
    now = [0.0]
    live = Live(lambda: now[0])
    for number in range(3 * STEPS):
        now[0] = number * STEP_S
        live.record(record(flow=hit(100, 64), ttft_s=0.1, family=f"{number}"))
    shown = live.shown()
    assert shown["totals"]["requests"] == 3 * STEPS
    assert shown["window"]["totals"]["requests"] == STEPS
    assert sum(shown["series"]["requests"]) == STEPS
    now[0] += 2 * STEPS * STEP_S
    assert live.shown()["window"]["totals"]["requests"] == 0
    assert live.shown()["totals"]["prompt"] == 300 * STEPS


def test_everything_kept_is_bounded() -> None:
    live, recent = Live(lambda: 0.0), Recent()
    for number in range(4 * FAMILIES_KEPT):
        one = record(family=f"{number:08x}", flow=hit(100 + number % 7, 64), ttft_s=0.1)
        live.record(one)
        recent.keep(None, one)
    live.record(record(family="big", flow=hit(10**6, 64)))
    assert len(live._families) <= FAMILIES_KEPT
    assert live.shown()["families"][0]["family"] == "big"
    assert len(live._steps) == 1
    assert len(live._steps[0].hit_s) <= 64
    assert len(recent) == KEPT
