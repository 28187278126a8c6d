"""The dashboard's routes: its page, the stream of states, and single requests.

    GET /dashboard                 the page; its script and style beside it
    GET /dashboard/events          server-sent events: ``state``, each second
    GET /dashboard/state           the present one alone
    GET /admin/requests            the last requests
    GET /admin/requests/{id}       one of them, with its scored candidates

The page loads nothing from elsewhere and holds no inline script or style; its policy says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from gateway.dashboard.live import Live
from gateway.dashboard.recent import Recent
from gateway.exchange import Answer
from gateway.httpserver import SERVER, json_answer
from gateway.router import Router
from gateway.tally import WorkerTally
from shared.errors import NoCapacity, NotFound

PAGE, EVENTS, STATE = "/dashboard", "/dashboard/events", "/dashboard/state"
REQUESTS = "/admin/requests"
LATEST = 40
EVERY_S = 1.0
FRESH_S = 0.9
"""Watchers that ask within this time get the same state."""
MOST_WATCHERS = 32
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]
_HERE = Path(__file__).parent
_STYLE = "../report/templates/names.css static/app.css"
"""Colours and patterns are those of the report."""
_FILES = {
    PAGE: ("static/index.html", "text/html; charset=utf-8"),
    f"{PAGE}/": ("static/index.html", "text/html; charset=utf-8"),
    f"{PAGE}/app.js": ("static/app.js", "text/javascript; charset=utf-8"),
    f"{PAGE}/app.css": (_STYLE, "text/css; charset=utf-8"),
}


class Dashboard:
    """What the admin listener asks for its page."""

    def __init__(
        self,
        router: Router,
        tally: WorkerTally,
        live: Live,
        recent: Recent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = tally
        """What each worker has served."""
        self._router, self._live, self._recent = router, live, recent
        self._clock = clock
        self._files = {
            path: (b"".join((_HERE / name).read_bytes() for name in names.split()), kind)
            for path, (names, kind) in _FILES.items()
        }
        self._state = b""
        self._made = -FRESH_S
        self.watchers = 0
        """Streams that are open."""

    def get(self, path: str) -> Answer | None:
        """The answer of a ``GET``; None: it is no route of the dashboard."""
        if path in self._files:
            body, kind = self._files[path]
            return Answer(200, body, [("Content-Type", kind), *_HEADERS])
        if path == STATE:
            return Answer(200, self.state(), [("Content-Type", "application/json"), *_HEADERS])
        if path == REQUESTS:
            return json_answer({"requests": self._recent.latest(LATEST)})
        if path.startswith(f"{REQUESTS}/"):
            found = self._recent.find(unquote(path.removeprefix(f"{REQUESTS}/")))
            if not found:
                raise NotFound("That request is not among the last ones; the ledger may have it.")
            return json_answer({"attempts": found})
        return None

    def has(self, path: str) -> bool:
        """Whether it is a route of the dashboard."""
        fixed = path in self._files or path in (STATE, EVENTS, REQUESTS)
        return fixed or path.startswith(f"{REQUESTS}/")

    def state(self) -> bytes:
        """Everything the page shows, as JSON; made anew at most every :data:`FRESH_S`."""
        now = self._clock()
        if now - self._made >= FRESH_S:
            self._state = msgspec.json.encode(
                {
                    "at": time.time(),
                    **self._live.shown(),
                    "workers": self._workers(now),
                    "recent": self._recent.latest(LATEST),
                }
            )
            self._made = now
        return self._state

    def _workers(self, now: float) -> list[dict[str, Any]]:
        return [
            {
                "id": status.id,
                "state": status.state.value,
                "reason": status.reason,
                "trust": status.trust.value,
                "trust_reason": status.trust_reason,
                "inflight": status.inflight,
                "running": status.running,
                "waiting": status.waiting,
                "queue_s": round(status.booked_prefill_s, 4),
                "index_blocks": status.index_blocks,
                "blocks_total": status.blocks_total,
                "blocks_used": status.blocks_used,
                "blocks_cached": status.blocks_cached,
                **asdict(self.tally.of(status.id)),
            }
            for status in self._router.workers(now)
        ]

    async def stream(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send states until the watcher leaves.

        :raises NoCapacity: too many watch already.
        """
        if self.watchers >= MOST_WATCHERS:
            raise NoCapacity("Too many dashboards are open.", retry_after_s=10.0)
        self.watchers += 1
        try:
            return await self._send(request)
        finally:
            self.watchers -= 1

    async def _send(self, request: web.BaseRequest) -> web.StreamResponse:
        response = head()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"event: state\ndata: " + self.state() + b"\n\n")
                await asyncio.sleep(EVERY_S)
        except ConnectionError:
            return response


def head() -> web.StreamResponse:
    """The head of a stream of states."""
    response = web.StreamResponse(headers=dict(_HEADERS) | {"Server": SERVER})
    response.content_type = "text/event-stream"
    response.force_close()
    return response
