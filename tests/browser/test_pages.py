"""The pages in a real browser: no error in its console, no request elsewhere, nothing cut off.

``make test-browser`` installs Chromium and runs these; pictures go into the folder that
``HEADWATER_PICTURES`` names, if it does.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from browserkit import Browser, Page
from dashboardkit import Scene
from ledgerkit import START, record, write_ledger

from gateway.records import RequestRecord, Shadow, TokenFlow, Why
from gateway.report import summarise, to_html
from gateway.routing.base import Trust
from shared.types import WorkerId

pytestmark = pytest.mark.browser
PICTURES = os.environ.get("HEADWATER_PICTURES", "")
VIEWS = [(1280, False), (1280, True), (390, False), (390, True)]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with Browser.start() as started:
        yield started


async def keep(page: Page, name: str, width: int, dark: bool) -> None:
    """The picture, for whoever wants to look at it."""
    if PICTURES:
        await page.picture(Path(PICTURES) / f"{name}-{width}-{'dark' if dark else 'light'}.png")


LEGIBLE = (Path(__file__).parent / "legible.js").read_text()


async def check(page: Page, allowed: str) -> None:
    """What every page must be."""
    assert page.errors == []
    assert await page.overflow() == []
    assert all(url.startswith((allowed, "data:")) for url in page.requests), page.requests
    assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    assert await page.evaluate(LEGIBLE) == []
    named = "[...document.querySelectorAll('[role=img]')].every(e => e.getAttribute('aria-label'))"
    assert await page.evaluate(named)
    heads = "[...document.querySelectorAll('table')].every(t => t.querySelector('th[scope=col]'))"
    assert await page.evaluate(heads)


def day() -> list[RequestRecord]:
    """A ledger with everything in it."""
    records = []
    losses = ("evicted", "diverted_for_load", "draining", "policy", "isolation")
    for number in range(600):
        lost = losses[number % 5]
        given = {"evicted": 160} if lost == "evicted" else {"available": 480, lost: 160}
        flow = TokenFlow(
            **{
                "prompt": 1000, "tail": 8, "cold": 512, "available": 320, "captured": 320,
                "stale_index": 32, "token_mismatch": 16, "gained": 16, "delivered": 288, **given,
            }
        )  # fmt: skip
        records.append(
            record(
                at=START + 12 * number,
                worker=f"host-with-a-long-name-{number % 50}.example.internal:8100",
                trust=("exact", "learned", "blind")[number // 7 % 3],
                tenant=f"tenant {number % 30}",
                family=f"{number % 7:08x}",
                path=(1, number % 3, number % 12, number),
                flow=flow,
                ttft_s=0.1 + (number % 13) / 50,
                itl_s=0.01,
                predicted_ttft_s=0.2,
                why=Why(code="holder", term="own", other="w9", other_matched=3, gap=0.2),
                round_robin=Shadow(matched_tokens=100, ttft_s=0.3),
            )
        )
    return records


@pytest.mark.parametrize(("width", "dark"), VIEWS)
async def test_the_report(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    ledger = write_ledger(tmp_path / "l.jsonl", day())
    file = tmp_path / "report.html"
    file.write_text(to_html(summarise([ledger], by=["tenant"])))
    page = await browser.open(file.as_uri(), width=width, dark=dark)
    await keep(page, "report", width, dark)
    await check(page, file.as_uri())
    for details in ("Table: tokens by name", "Table: the steps", "Table: percentiles"):
        await page.evaluate(
            "[...document.querySelectorAll('summary')]"
            f".find(s => s.textContent === '{details}').click()"
        )
    await check(page, file.as_uri())


@pytest.mark.parametrize(("width", "dark"), VIEWS)
async def test_the_dashboard_with_a_hundred_workers(
    browser: Browser, width: int, dark: bool
) -> None:
    scene = Scene(100, 500)
    router, now = scene.rig.router, scene.rig.now
    router.drain(WorkerId("w2"), now)
    router.set_trust(WorkerId("w3"), Trust.LEARNED, "gap in its events", now)
    router.set_health(WorkerId("w4"), False, now, "connection refused")
    async with scene.serve() as url:
        page = await browser.open(f"{url}/dashboard", width=width, dark=dark)
        await page.until("document.querySelectorAll('#workers tr').length === 100")
        await keep(page, "dashboard", width, dark)
        await check(page, url)
        assert await page.evaluate("document.querySelectorAll('#recent button').length") == 40
        await page.evaluate("document.querySelector('#recent button').click()")
        await page.until("document.querySelector('#detail-body table') !== null")
        told = await page.evaluate("document.querySelector('#detail-body').textContent")
        assert "The first 12 of" in told
        await check(page, url)
        await page.evaluate("document.querySelector('dialog').close()")


async def test_the_dashboard_goes_on_by_itself(browser: Browser) -> None:
    scene = Scene(3, 30)
    async with scene.serve() as url:
        page = await browser.open(f"{url}/dashboard")
        await page.until("document.querySelector('#sub').textContent.startsWith('30 requests')")
        scene.request()
        await page.until("document.querySelector('#sub').textContent.startsWith('31 requests')")
        order = "document.querySelector('#workers-order')"
        await page.evaluate(
            f"{order}.value = 'trouble'; {order}.dispatchEvent(new Event('change'))"
        )
        scene.rig.router.set_health(WorkerId("w3"), False, 0.0, "gone")
        await page.until("document.querySelector('#workers th').textContent === 'w3'")
        assert page.errors == []


async def test_names_cannot_become_markup(browser: Browser) -> None:
    scene = Scene(2, 3)
    evil = "<img src=x onerror=document.title='pwned'>"
    name = record(request_id="req-x", model=evil, worker=evil, family=evil, prompt_tokens=5)
    scene.recent.keep(None, name)
    scene.live.record(name)
    async with scene.serve() as url:
        page = await browser.open(f"{url}/dashboard")
        await page.until("document.querySelectorAll('#recent tr').length === 4")
        assert await page.evaluate("document.querySelectorAll('#recent img').length") == 0
        assert await page.evaluate("document.title") == "Headwater"
        assert page.errors == []


async def test_a_browser_that_knows_the_token_sees_it(browser: Browser) -> None:
    import base64

    scene = Scene(2, 7)
    async with scene.serve(token="s3cret") as url:
        basic = "Basic " + base64.b64encode(b"me:s3cret").decode()
        page = await browser.open(f"{url}/dashboard", headers={"Authorization": basic})
        await page.until("document.querySelector('#sub').textContent.startsWith('7 requests')")
        assert page.errors == []


async def test_what_is_checked_would_be_noticed(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(
        "<body style='background:#fff'><p style='color:#999'>faint</p>"
        "<div style='width:2000px'>wide</div><script>console.error('x')</script>"
        "<img src='http://127.0.0.1:9/x'></body>"
    )
    page = await browser.open(file.as_uri())
    assert [text.split(":")[1].split()[0] for text in await page.evaluate(LEGIBLE)] == ["faint"]
    assert any("DIV" in name for name in await page.overflow())
    await page.until("document.readyState === 'complete'")
    assert page.errors
    assert "http://127.0.0.1:9/x" in page.requests
