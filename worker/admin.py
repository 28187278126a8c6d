"""The admin listener: what the cache holds, emptying it, and the adapters."""

from __future__ import annotations

import ipaddress
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from shared.errors import ConfigError
from shared.lifetimes import Distribution
from worker.config import ServeConfig
from worker.routes_adapters import AdapterRoutes
from worker.service import Service
from worker.web import (
    echo_request_id,
    errors_as_json,
    json_response,
    refuse_browsers,
    require_bearer,
)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(config: ServeConfig) -> None:
    """Raise ``ConfigError`` for an admin listener that others reach without a token."""
    if not config.admin_token and not is_loopback(config.admin_host):
        raise ConfigError(
            "serve.admin_token", "", f"required because {config.admin_host} is not loopback"
        )


def _summary(values: Distribution) -> dict[str, Any]:
    """A histogram in JSON terms; the last count lies beyond the last bound."""
    counts, bounds = list(values.counts), list(values.bounds)
    return {"count": values.count, "mean": values.mean, "le": bounds, "counts": counts}


class AdminRoutes:
    """Handlers under ``/admin/cache``."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def cache(self, _request: web.Request) -> web.Response:
        """Blocks, totals and the position of the event log."""
        loaded = self._service.loaded()
        log = self._service.events()
        stats = loaded.engine.stats()
        redis_up = self._service.redis_up
        prompt = stats.prefill_cached_tokens + stats.prefill_computed_tokens
        return json_response(
            {
                "worker": log.worker,
                "epoch": log.epoch,
                "seq": log.seq,
                "prefix_cache": loaded.info.prefix_cache,
                "block_size": loaded.info.block_size,
                "blocks": {
                    "total": loaded.info.blocks_total,
                    "used": stats.blocks_used,
                    "cached": stats.blocks_cached,
                    "free": stats.blocks_free,
                },
                "host_blocks": {
                    "total": stats.host_blocks_used + stats.host_blocks_free,
                    "used": stats.host_blocks_used,
                    "free": stats.host_blocks_free,
                    "moved_out": stats.host_blocks_moved_out,
                    "moved_in": stats.host_blocks_moved_in,
                    "dropped": stats.host_blocks_dropped,
                },
                "lifetimes": {
                    name: _summary(getattr(stats.lifetimes, name))
                    for name in stats.lifetimes.__struct_fields__
                },
                "prompt_tokens": {
                    "cached": stats.prefill_cached_tokens,
                    "from_host": stats.host_tokens,
                    "computed": stats.prefill_computed_tokens,
                },
                "hit_rate": stats.prefill_cached_tokens / prompt if prompt else None,
                "redis": None if redis_up is None else {"up": redis_up()},
            }
        )

    async def flush(self, _request: web.Request) -> web.Response:
        """Forget all cached blocks; what running requests hold stays theirs."""
        loaded = self._service.loaded()
        cached = loaded.engine.stats().blocks_cached
        await loaded.engine.flush_cache()
        return json_response({"status": "flushed", "blocks_cached_before": cached})


def admin_app(service: Service) -> web.Application:
    """The application behind the admin listener."""
    config = service.config.serve
    guard: Middleware = refuse_browsers
    if config.admin_token:
        guard = require_bearer((config.admin_token,), ())
    app = web.Application(middlewares=[errors_as_json, guard])
    app.on_response_prepare.append(echo_request_id)
    routes = AdminRoutes(service)
    app.router.add_get("/admin/cache", routes.cache)
    app.router.add_post("/admin/cache/flush", routes.flush)
    AdapterRoutes(service).add_to(app)
    return app
