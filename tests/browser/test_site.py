"""The documentation's site as it was built: nothing from elsewhere, its search works, it fits.

``make test-browser`` builds it before; pictures go where ``HEADWATER_PICTURES`` says.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from browserkit import Browser

pytestmark = pytest.mark.browser
SITE = Path(__file__).resolve().parents[2] / "build" / "site"
PICTURES = os.environ.get("HEADWATER_PICTURES", "")
PAGES = ("index", "concepts", "http", "comparison")
SHADOWS = "[...document.querySelectorAll('*')].filter(one => one.shadowRoot)"
FIELD = f"{SHADOWS}.map(one => one.shadowRoot.querySelector('input')).find(one => one)"
FOUND = f"{SHADOWS}.flatMap(one => [...one.shadowRoot.querySelectorAll('a[href]')])"
VIEWS = [(1280, False), (1280, True), (390, False)]


@pytest.fixture
async def site() -> AsyncIterator[str]:
    assert (SITE / "index.html").exists(), "run `make site`"
    app = web.Application()
    app.router.add_static("/", SITE)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def test_no_page_loads_anything_from_elsewhere() -> None:
    pages = list(SITE.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text()
        assert not re.findall(r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//[^"]+', text), page
        assert not re.findall(r'<link[^>]+href="(?:https?:)?//[^"]+', text), page
    for sheet in SITE.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?https?:|@import", sheet.read_text()), sheet


@pytest.mark.parametrize(("width", "dark"), VIEWS)
@pytest.mark.parametrize("name", PAGES)
async def test_a_page(site: str, name: str, width: int, dark: bool) -> None:
    async with Browser.start() as browser:
        page = await browser.open(f"{site}/{name}.html", width=width, dark=dark)
        await page.until("document.querySelector('article h1') !== null")
        await page.until("[...document.images].every(one => one.complete)")
        if PICTURES:
            shade = "dark" if dark else "light"
            await page.picture(Path(PICTURES) / f"site-{name}-{width}-{shade}.png")
        assert page.errors == []
        assert all(url.startswith((site, "data:", "blob:")) for url in page.requests)
        assert await page.evaluate("[...document.images].every(one => one.naturalWidth > 0)")
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


async def test_search_finds_a_page(site: str) -> None:
    async with Browser.start() as browser:
        page = await browser.open(f"{site}/index.html")
        await page.until("document.querySelector('.md-search__button') !== null")
        await page.evaluate("document.querySelector('.md-search__button').click()")
        await page.until(f"{FIELD} !== undefined")
        await page.evaluate(
            f"{FIELD}.value = 'radix'; {FIELD}.dispatchEvent(new Event('input', {{bubbles: true}}))"
        )
        await page.until(f"{FOUND}.some(link => link.href.includes('concepts.html'))")
        assert page.errors == []
        assert all(url.startswith((site, "data:", "blob:")) for url in page.requests)
