"""Admin routes about the index: what it holds, who holds a prompt, and forgetting it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import structlog
from aiohttp import web

from gateway.asked import Asking
from gateway.exchange import Answer
from gateway.httpserver import json_answer, json_body, read_body
from gateway.router import Router
from shared.errors import BadRequest, ModelNotFound, NotFound
from shared.types import WorkerId

INDEX = "/admin/index"
WHO, FLUSH = f"{INDEX}/who", f"{INDEX}/flush"
_MAX_FLUSH_BODY = 64 * 1024


class IndexRoutes:
    """``resync`` is called for each worker that was flushed."""

    def __init__(
        self,
        router: Router,
        asking: Asking,
        resync: Callable[[WorkerId], None],
        clock: Callable[[], float],
    ) -> None:
        self._router, self._asking, self._resync, self._clock = router, asking, resync, clock
        self.routes: Mapping[str, Callable[[web.BaseRequest], Awaitable[Answer]]] = {
            WHO: self._who,
            FLUSH: self._flush,
        }
        """Those of POST."""
        self._log = structlog.get_logger("headwater.admin")

    def stats(self) -> Answer:
        """What the index holds, in all and of each worker."""
        return json_answer(asdict(self._router.index_stats(self._clock())))

    async def _who(self, request: web.BaseRequest) -> Answer:
        """Who holds the prompt of a request; changes nothing."""
        asked = await self._asking.read(request)
        query = asked.work.query
        held = self._router.who(query, self._clock())
        if held is None:
            name = query.model[:128]
            raise ModelNotFound(
                f"The model '{name}' does not exist or is not served here.", param="model"
            )
        return json_answer({"request": asked.view, **asdict(held)})

    async def _flush(self, request: web.BaseRequest) -> Answer:
        """Forget what one worker holds (``{"worker": ID}``), or all (``{"all": true}``)."""
        body: dict[str, Any] = json_body(await read_body(request, _MAX_FLUSH_BODY))
        name, everything = body.get("worker"), body.get("all")
        if everything is True and name is None:
            workers = [status.id for status in self._router.workers(self._clock())]
        elif isinstance(name, str) and everything in (None, False):
            workers = [WorkerId(name)]
        else:
            raise BadRequest(
                "Either 'worker' must be a worker's id, or 'all' true.", param="worker"
            )
        gone = {worker: self._router.flush(worker, self._clock()) for worker in workers}
        if None in gone.values():
            raise NotFound(f"There is no worker '{name}'.")
        for worker, blocks in gone.items():
            self._log.info("index_flushed", worker=worker, blocks=blocks)
            self._resync(worker)
        return json_answer({"flushed": gone})
