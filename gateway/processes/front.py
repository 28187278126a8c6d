"""The admin listener of several processes: answers for all of them.

metrics, workers, requests, dashboard   asked of all and merged (metrics.py, views.py)
add, remove, drain, undrain, flush      told to all; later ones are told too (changes.py)
report                                  made here: the ledger's files lie in one folder
explain, who, index, pages              asked of the one that has been up longest
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin import JSON, WORKERS, Report, target
from gateway.adminguard import Guard
from gateway.adminindex import FLUSH as FLUSH_INDEX
from gateway.asked import MAX_BODY
from gateway.dashboard.pages import EVENTS, LATEST, REQUESTS, STATE
from gateway.exchange import Answer
from gateway.foster import FLUSH as FLUSH_LEDGER
from gateway.httpserver import json_answer, read_body
from gateway.processes.calls import Reply, Silent
from gateway.processes.changes import Change
from gateway.processes.group import Group
from gateway.processes.metrics import Totals
from gateway.processes.states import StateStream
from gateway.processes.views import Json, merge_recent, merge_states, merge_workers
from shared.errors import (
    InternalError,
    MethodNotAllowed,
    NoCapacity,
    NotFound,
)

SETTLE_S = 2.0
"""How long a change waits for a process that has not met the worker yet."""
PASSED_ON = (
    *("Content-Type", "Content-Security-Policy", "X-Content-Type-Options"),
    *("Referrer-Policy", "Cache-Control", "Retry-After"),
)


def process_families(answering: int, restarts: int) -> list[Metric]:
    """What only several processes have."""
    died = CounterMetricFamily(
        "headwater_process_restarts", "Gateway processes that died and were started again."
    )
    died.add_metric([], restarts)
    up = GaugeMetricFamily("headwater_processes", "Gateway processes that answer.")
    up.add_metric([], answering)
    return [up, died]


class Front:
    """Handles the requests of the admin listener.

    :param report: sums up the ledger's folder; None: there is no ledger.
    """

    def __init__(self, token: str, group: Group, report: Report | None) -> None:
        self._guard, self._group, self._report = Guard(token), group, report
        self._totals = Totals()
        self._states = StateStream(self._state)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; the server's entry point."""
        return await self._guard.admit(request, self._dispatch)

    async def _dispatch(self, request: web.BaseRequest) -> Answer | web.StreamResponse:
        path = request.rel_url.raw_path
        if path == EVENTS and request.method == "GET":
            return await self._states.stream(request)
        if request.method in ("GET", "HEAD"):
            return await self._get(request, path)
        body = await read_body(request, MAX_BODY)
        if path == FLUSH_INDEX:
            return await self._flush_index(body)
        if path == WORKERS and request.method == "POST":
            return await self._change("POST", path, body, "", "add")
        if path.startswith(f"{WORKERS}/"):
            worker, action = target(path)
            if request.method == "DELETE" and not action:
                return await self._change("DELETE", path, None, worker, "remove")
            if request.method == "POST" and action:
                return await self._change("POST", path, None, worker, action)
            raise MethodNotAllowed(f"{request.method} is not possible here.")
        return await self._any(request, path, body)

    async def _get(self, request: web.BaseRequest, path: str) -> Answer:
        if path == "/metrics":
            return await self._metrics()
        if path == WORKERS:
            return json_answer(merge_workers(await self._views(path)))
        if path == STATE:
            return json_answer(await self._state())
        if path == REQUESTS:
            views = await self._views(path)
            return json_answer({"requests": merge_recent((v["requests"] for v in views), LATEST)})
        if path.startswith(f"{REQUESTS}/"):
            return await self._whoever_knows(path)
        if path == "/admin/report":
            return await self._summed_up()
        if path == "/health":
            return json_answer({"status": "alive", "processes": len(self._group.up)})
        return await self._any(request, path, None)

    # --- asking

    async def _all(
        self, method: str, path: str, body: bytes | None = None
    ) -> dict[int, Reply | Silent]:
        processes = list(self._group.up)
        if not processes:
            raise NoCapacity("No process of the gateway is up.", retry_after_s=1.0)
        return await self._group.calls.ask_all(processes, method, path, body)

    async def _views(self, path: str) -> list[Json]:
        """Those of all that answer."""
        replies = (await self._all("GET", path)).values()
        views = [reply.json() for reply in replies if isinstance(reply, Reply) and reply.ok]
        if not views:
            raise NoCapacity("No process of the gateway answers.", retry_after_s=1.0)
        return views

    async def _any(self, request: web.BaseRequest, path: str, body: bytes | None) -> Answer:
        """What the first that answers says; all would say the same."""
        kept = {
            name: value
            for name, value in request.headers.items()
            if name.lower() == "content-type" or name.lower().startswith("x-headwater-")
        }
        method = "GET" if request.method == "HEAD" else request.method
        for process in list(self._group.up):
            try:
                reply = await self._group.calls.ask(process, method, path, body, kept)
            except Silent:
                continue
            return _passed_on(reply)
        raise NoCapacity("No process of the gateway answers.", retry_after_s=1.0)

    async def _whoever_knows(self, path: str) -> Answer:
        replies = [r for r in (await self._all("GET", path)).values() if isinstance(r, Reply)]
        known = next((reply for reply in replies if reply.ok), None)
        if known is None and not replies:
            raise NoCapacity("No process of the gateway answers.", retry_after_s=1.0)
        return _passed_on(known or replies[0])

    async def _metrics(self) -> Answer:
        present = []
        for process, reply in (await self._all("GET", "/metrics")).items():
            if isinstance(reply, Reply) and reply.ok:
                shown = text_string_to_metric_families(reply.body.decode())
                self._totals.take(process, self._group.life(process), shown)
                present.append(process)
        own = process_families(len(present), self._group.restarts)
        registry = CollectorRegistry()
        registry.register(_Shown([*self._totals.merged(present), *own]))
        return Answer(200, generate_latest(registry), [("Content-Type", CONTENT_TYPE_LATEST)])

    async def _state(self) -> Json:
        return merge_states(await self._views(STATE), LATEST)

    async def _summed_up(self) -> Answer:
        if self._report is None:
            raise NotFound("There is no ledger: [ledger] dir is not set.")
        await self._all("POST", FLUSH_LEDGER)
        return Answer(200, await asyncio.to_thread(self._report), [JSON])

    # --- changing

    async def _flush_index(self, body: bytes) -> Answer:
        replies = await self._all("POST", FLUSH_INDEX, body)
        done = [r for r in replies.values() if isinstance(r, Reply) and r.ok]
        if len(done) < len(replies):
            return self._refused(replies)
        flushed: dict[str, int] = {}
        for reply in done:
            for worker, blocks in reply.json()["flushed"].items():
                flushed[worker] = max(blocks, flushed.get(worker, 0))
        return json_answer({"flushed": flushed, "processes": len(done)})

    async def _change(
        self, method: str, path: str, body: bytes | None, worker: str, action: str
    ) -> Answer:
        """Done by all, or the answer says who did not. One refusal by all is passed on as it is."""
        if action == "undrain":  # whoever catches up meanwhile must not drain behind it
            self._group.changes.note(Change(method, path, body, worker, action))
        replies = await self._all(method, path, body)
        done = [r for r in replies.values() if isinstance(r, Reply) and r.ok]
        if not done:
            return self._refused(replies)
        told = done[0].json()
        change = Change(method, path, body, worker or str(told["worker"]), action)
        self._group.changes.note(change)
        behind = [n for n, r in replies.items() if not isinstance(r, Reply) or not r.ok]
        if behind and action == "undrain":  # nothing that a new process would have to be told
            return self._refused(replies)
        tasks = {n: self._group.catch_up(n, change) for n in behind}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=SETTLE_S)
        late = [n for n, task in tasks.items() if not task.done()]
        if late and action != "remove":  # whom a process has not met it need not let go
            raise InternalError(
                f"{len(replies) - len(late)} of {len(replies)} processes did it; "
                f"still being told: {', '.join(map(str, late))}."
            )
        return json_answer({**told, "processes": len(replies)})

    def _refused(self, replies: dict[int, Reply | Silent]) -> Answer:
        answers = [r for r in replies.values() if isinstance(r, Reply)]
        refusals = [r for r in answers if not r.ok]
        if len(refusals) == len(replies):
            return _passed_on(refusals[0])
        silent = [str(r) for r in replies.values() if isinstance(r, Silent)]
        silent += [f"process {n}: {r.status}" for n, r in replies.items() if r in refusals]
        done = len(answers) - len(refusals)
        raise InternalError(f"{done} of {len(replies)} processes did it; {'; '.join(silent)}.")


def _passed_on(reply: Reply) -> Answer:
    kept = [(name, reply.headers[name]) for name in PASSED_ON if name in reply.headers]
    return Answer(reply.status, reply.body, kept)


class _Shown:
    """Metrics that are there already, as the library asks for them."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """All of them."""
        return self._metrics
