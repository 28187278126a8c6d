"""One of several processes on a port accepts from the sockets that its parent names.

Its own, once it can serve; and that of a sibling that is not there: the kernel goes on to hand new
connections to a dead process's socket as long as somebody has it open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from gateway.exchange import Answer
from gateway.httpserver import json_answer, json_body, read_body
from gateway.inherited import Inherited
from gateway.ledger import LedgerSink
from gateway.wire.server import WireServer
from shared.errors import BadRequest

ADOPT, RELEASE, FLUSH = (f"/admin/process/{what}" for what in ("adopt", "release", "flush"))
_MAX_BODY = 1024
Route = Callable[[web.BaseRequest], Awaitable[Answer]]


class Foster:
    """What the parent asks of one process, beside what an operator may."""

    def __init__(self, server: WireServer, inherited: Inherited) -> None:
        self._server, self._inherited = server, inherited
        self._adopted: dict[int, list[asyncio.Server]] = {}
        self._ledger: LedgerSink | None = None

    def routes(self, ledger: LedgerSink | None) -> Mapping[str, Route]:
        """Those of POST."""
        self._ledger = ledger
        return {ADOPT: self._adopt, RELEASE: self._release, FLUSH: self._flush}

    async def _adopt(self, request: web.BaseRequest) -> Answer:
        number = await self._number(request)
        if number not in self._adopted:
            self._adopted[number] = []
            for sock in self._inherited.of(number):
                self._adopted[number].append(await self._server.listen_on(sock))
        return json_answer({"adopted": sorted(self._adopted)})

    async def _release(self, request: web.BaseRequest) -> Answer:
        for listener in self._adopted.pop(await self._number(request), []):
            listener.close()
        return json_answer({"adopted": sorted(self._adopted)})

    async def _flush(self, request: web.BaseRequest) -> Answer:
        """Write the ledger's last records."""
        if self._ledger is not None:
            await asyncio.to_thread(self._ledger.flush)
        return json_answer({})

    async def _number(self, request: web.BaseRequest) -> int:
        number = json_body(await read_body(request, _MAX_BODY)).get("process")
        if not isinstance(number, int) or number not in range(len(self._inherited.public)):
            raise BadRequest("'process' must be the number of a process.", param="process")
        return number

    def close(self) -> None:
        """Accept nothing any more."""
        for listeners in self._adopted.values():
            for listener in listeners:
                listener.close()
        self._adopted.clear()
