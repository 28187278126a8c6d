"""The admin listener: metrics, workers, and why a request would go where.

It listens on its own address. Off loopback every route needs the admin token; on loopback it is
checked as soon as one is configured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol
from urllib.parse import unquote

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gateway import work
from gateway.adminguard import Guard
from gateway.adminindex import INDEX, IndexRoutes
from gateway.asked import MAX_BODY, Asking
from gateway.browsers import is_loopback
from gateway.config import GatewayConfig
from gateway.dashboard.pages import EVENTS, Dashboard
from gateway.decision import WorkerStatus
from gateway.exchange import Answer
from gateway.explanation import told
from gateway.feeds.sources import SourceState
from gateway.httpserver import json_answer, json_body, read_body
from gateway.openapi import OPENAPI, document
from gateway.router import Router
from shared.errors import (
    BadRequest,
    ConfigError,
    MethodNotAllowed,
    NotFound,
)
from shared.types import WorkerId

WORKERS, EXPLAIN = "/admin/workers", "/admin/explain"
READS = frozenset({"/metrics", "/health", "/admin/report", INDEX, WORKERS, OPENAPI})
"""Routes of GET, beside the dashboard's."""
JSON = ("Content-Type", "application/json")


class Fleet(Protocol):
    """What of the feeds the admin routes can change."""

    async def add_worker(self, url: str) -> WorkerId:
        """Take a worker in by hand; raises ``BadRequest``."""
        ...

    def remove_worker(self, worker: WorkerId) -> bool:
        """Let a worker go. False: unknown."""
        ...

    async def drain_worker(self, worker: WorkerId, *, on: bool) -> bool:
        """No new requests there, or new ones again, for all gateways. False: unknown."""
        ...

    def resync(self, worker: WorkerId) -> None:
        """Ask a worker that has an event feed for its whole contents again."""
        ...

    def outsiders(self) -> list[WorkerStatus]:
        """Addresses that have never answered."""
        ...

    def named_by(self, worker: WorkerId) -> list[str]:
        """Who named a worker."""
        ...

    def lists(self) -> list[SourceState]:
        """Lists of workers that are followed."""
        ...


Report = Callable[[], bytes]
"""The hit-rate report as JSON. Blocks, so it is called in a thread; raises ``ApiError``."""


Route = Callable[[web.BaseRequest], Awaitable[Answer]]


def target(path: str) -> tuple[WorkerId, str]:
    """(worker, action) of ``/admin/workers/{id}[/action]``; raises ``NotFound``."""
    if not path.startswith(f"{WORKERS}/"):
        raise NotFound("There is no such admin route.")
    # Split before it is decoded: an id may hold a slash.
    rest = path.removeprefix(f"{WORKERS}/")
    for action in ("drain", "undrain"):
        if rest.endswith(f"/{action}"):
            return WorkerId(unquote(rest.removesuffix(f"/{action}"))), action
    return WorkerId(unquote(rest)), ""


def check_token(config: GatewayConfig) -> None:
    """Raise ``ConfigError`` if the admin listener would be open to the network."""
    listen = config.listen
    if not listen.admin_token and not is_loopback(listen.admin_host):
        raise ConfigError("listen.admin_token", "", "required when admin_host is not on loopback")


class Admin:
    """Handles the requests of the admin listener."""

    def __init__(
        self,
        config: GatewayConfig,
        router: Router,
        asking: Asking,
        fleet: Fleet,
        registry: CollectorRegistry,
        report: Report | None,
        dashboard: Dashboard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._fleet, self._registry, self._report, self._clock = fleet, registry, report, clock
        self.asking = asking
        self._index = IndexRoutes(router, asking, fleet.resync, clock)
        self._dashboard = dashboard
        self._guard = Guard(config.listen.admin_token)
        self.internal: Mapping[str, Route] = {}
        """Further routes of POST, for the process that started this one."""
        self._log = structlog.get_logger("headwater.admin")

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; the server's entry point."""
        return await self._guard.admit(request, self._dispatch)

    async def _dispatch(self, request: web.BaseRequest) -> Answer | web.StreamResponse:
        path, method = request.rel_url.raw_path, request.method
        if method == "GET" and path == EVENTS:
            return await self._dashboard.stream(request)
        if method in ("GET", "HEAD"):
            return await self._get(path)
        if method == "POST" and path == WORKERS:
            return await self._add(json_body(await read_body(request, MAX_BODY)))
        if method == "POST" and path == EXPLAIN:
            return await self._explain(request)
        if method == "POST" and path in self._index.routes:
            return await self._index.routes[path](request)
        if method == "POST" and path in self.internal:
            return await self.internal[path](request)
        if self._other_methods(path):
            raise MethodNotAllowed(f"{method} is not possible here.")
        worker, action = target(path)
        if method == "DELETE" and not action:
            return self._changed(worker, "removed", self._fleet.remove_worker(worker))
        if method == "POST" and action == "drain":
            known = await self._fleet.drain_worker(worker, on=True)
            return self._changed(worker, "draining", known)
        if method == "POST" and action == "undrain":
            known = await self._fleet.drain_worker(worker, on=False)
            return self._changed(worker, "ready", known)
        raise MethodNotAllowed(f"{method} is not possible here.")

    async def _get(self, path: str) -> Answer:
        if path == "/metrics":
            body = generate_latest(self._registry)
            return Answer(200, body, [("Content-Type", CONTENT_TYPE_LATEST)])
        if path == WORKERS:
            return json_answer(self._workers())
        if path == INDEX:
            return self._index.stats()
        if path == "/admin/report":
            if self._report is None:
                raise NotFound("There is no ledger: [ledger] dir is not set.")
            return Answer(200, await asyncio.to_thread(self._report), [JSON])
        if path == "/health":
            return json_answer({"status": "alive"})
        if path == OPENAPI:
            return Answer(200, document("admin"), [JSON])
        answer = self._dashboard.get(path)
        if answer is not None:
            return answer
        if self._other_methods(path):
            raise MethodNotAllowed("This route takes POST only.")
        raise NotFound("There is no such admin route.")

    def _other_methods(self, path: str) -> bool:
        """Whether it is a route, for whoever asked it in the wrong way."""
        posts = (EXPLAIN, *self._index.routes)
        return path in READS or path in posts or self._dashboard.has(path)

    def _workers(self) -> dict[str, Any]:
        """All workers, those that have never answered too, and the lists that name them."""
        known = self._router.workers(self._clock())
        names = {status.id for status in known}
        strangers = [one for one in self._fleet.outsiders() if one.id not in names]
        workers = [
            {
                **asdict(status),
                **asdict(self._dashboard.tally.of(status.id)),
                "sources": self._fleet.named_by(status.id),
            }
            for status in (*known, *strangers)
        ]
        return {"workers": workers, "lists": [asdict(one) for one in self._fleet.lists()]}

    def _changed(self, worker: WorkerId, what: str, known: bool) -> Answer:
        if not known:
            raise NotFound(f"There is no worker '{worker}'.")
        self._log.info("worker_changed", worker=worker, state=what)
        return json_answer({"worker": worker, "state": what})

    async def _add(self, body: dict[str, Any]) -> Answer:
        url = body.get("url")
        if not isinstance(url, str):
            raise BadRequest("'url' must be a string.", param="url")
        worker = await self._fleet.add_worker(url)
        self._log.info("worker_changed", worker=worker, state="added")
        return json_answer({"worker": worker, "state": "added"})

    async def _explain(self, request: web.BaseRequest) -> Answer:
        """How a request would be routed now; changes nothing."""
        asked = await self.asking.read(request)
        item = asked.work
        try:
            decision = self._router.explain(
                item.query, self._clock(), policy=item.policy, exclude=item.elsewhere
            )
        except KeyError:
            reason = f"There is no policy '{item.policy}'."
            raise BadRequest(reason, param="x-headwater-policy") from None
        return json_answer({"request": asked.view, **told(work.settled(item, decision))})
