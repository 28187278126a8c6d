"""A span for each call of a traced request: the gateway's attempt, or any caller, is its parent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from shared.spans import Span, SpanExport, read_parent


def traced(export: SpanExport, rng: Random, wall: Callable[[], float] = time.time) -> Middleware:
    """Only calls that say they are traced: a worker begins no traces of its own."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        parent = read_parent(request.headers.get("traceparent"))
        if parent is None or not parent.sampled:
            return await handler(request)
        begun, status = wall(), 499  # a client that leaves cancels the handler
        try:
            response = await handler(request)
            status = response.status
            return response
        except Exception:
            status = 500
            raise
        finally:
            info = request.match_info.route.resource
            route = info.canonical if info is not None else "other"
            span = Span(
                name=f"{request.method} {route}",
                server=True,
                trace_id=parent.trace_id,
                span_id=rng.getrandbits(64) or 1,
                parent_id=parent.span_id,
                start_s=begun,
                end_s=wall(),
                attributes={"http.route": route, "http.response.status_code": status},
                failed=status >= 500,
            )
            export.add(lambda: (span,))

    return middleware


def closing(export: SpanExport) -> Callable[[web.Application], Awaitable[None]]:
    """For ``on_cleanup``: what waits is exported, off the event loop."""

    async def close(_app: web.Application) -> None:
        await asyncio.to_thread(export.close)

    return close
