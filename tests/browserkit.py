"""A headless Chromium over its DevTools protocol: open a page, run script in it, take its picture.

    async with Browser.start() as browser:
        page = await browser.open(url, width=390, dark=True)
        await page.until("document.querySelector('#x') !== null")
        assert page.errors == []
        page.picture ...

Needs Debian's ``chromium`` (or another in ``HEADWATER_CHROMIUM``) and nothing else: the protocol is
JSON over a web socket.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--mute-audio", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
START_S = 60.0


def executable() -> str | None:
    """Where a browser is, if there is one."""
    names = (os.environ.get("HEADWATER_CHROMIUM", ""), "chromium", "chromium-browser")
    return next((found for name in names if name and (found := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._count = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        """Console errors, exceptions, failed loads and refused content, as they came."""
        self.requests: list[str] = []
        """Every address that was asked for."""
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        self._count += 1
        number = self._count
        future = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(60):
            answer = await future
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]  # type: ignore[no-any-return]

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def evaluate(self, expression: str) -> Any:
        """Value of an expression in the page."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def until(self, expression: str, within_s: float = 30.0) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline = time.monotonic() + within_s
        while True:
            value = await self.evaluate(expression)
            if value:
                return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}; errors: {self.errors}")
            await asyncio.sleep(0.05)

    async def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        shot = await self.call(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))

    async def overflow(self) -> list[str]:
        """Elements that make the page wider than the window; what scrolls by itself is fine."""
        return await self.evaluate(  # type: ignore[no-any-return]
            """[...document.querySelectorAll('body *')].filter(e => {
                 if (e.closest('.scroll') || e.closest('svg')) return false;
                 return e.getBoundingClientRect().right > window.innerWidth + 1;
               }).map(e => e.tagName + '.' + e.className)"""
        )

    async def close(self) -> None:
        """End the tab's connection."""
        await self._socket.close()
        await self._reader


class Browser:
    """A running Chromium."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: str) -> None:
        self._http, self._endpoint = http, endpoint
        self._pages: list[Page] = []

    @classmethod
    @asynccontextmanager
    async def start(cls) -> AsyncIterator[Browser]:
        """Start one with an empty profile; it ends with the context."""
        program = executable()
        assert program, "no chromium: apt-get install chromium, or set HEADWATER_CHROMIUM"
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            process = await asyncio.create_subprocess_exec(
                program, *FLAGS, f"--user-data-dir={profile}", "about:blank",
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            try:
                port = await _port(Path(profile) / "DevToolsActivePort", process)
                async with aiohttp.ClientSession() as http:
                    browser = cls(http, f"http://127.0.0.1:{port}")
                    yield browser
                    for page in browser._pages:
                        await page.close()
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    async def open(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        headers: dict[str, str] | None = None,
    ) -> Page:
        """A tab with a page loaded."""
        async with self._http.put(f"{self._endpoint}/json/new?about:blank") as answer:
            target = await answer.json()
        socket = await self._http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**28)
        page = Page(socket)
        self._pages.append(page)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        if headers:
            await page.call("Network.setExtraHTTPHeaders", headers=headers)
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.call("Emulation.setEmulatedMedia", features=[scheme])
        await page.call("Page.navigate", url=url)
        await page.until("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    """The debugging port, which the browser writes into its profile."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise RuntimeError(f"chromium ended with {process.returncode}")
        text = await asyncio.to_thread(lambda: file.read_text() if file.exists() else "")
        if text:
            return int(text.split()[0])
        await asyncio.sleep(0.05)
    raise TimeoutError("chromium did not start")
