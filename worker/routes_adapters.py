"""Loading and unloading LoRA adapters while serving; on the admin listener only.

A folder is a path on the worker's machine, so who may name one may read files there: these routes
have vLLM's names and fields, and never appear on the public listener.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from shared.errors import BadRequest
from shared.openai import decode_object
from worker.adapters import Adapter
from worker.fields import Fields
from worker.service import Service
from worker.web import json_response, read_body

BODY_LIMIT = 1 << 20


class AdapterRoutes:
    """``/v1/load_lora_adapter``, ``/v1/unload_lora_adapter`` and ``/admin/adapters``."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_post("/v1/load_lora_adapter", self.load)
        app.router.add_post("/v1/unload_lora_adapter", self.unload)
        app.router.add_get("/admin/adapters", self.adapters)

    async def load(self, request: web.Request) -> web.Response:
        """Answers once requests can name the adapter."""
        fields = Fields(decode_object(await read_body(request, BODY_LIMIT)))
        name, path = _required(fields, "lora_name"), _required(fields, "lora_path")
        adapters = self._service.serving().adapters
        adapter = await adapters.load(name, path, replace=fields.flag("load_inplace"))
        return json_response({"status": "loaded", **_shown(adapter)})

    async def unload(self, request: web.Request) -> web.Response:
        """Answers once no request can name it any more; those that run go on."""
        fields = Fields(decode_object(await read_body(request, BODY_LIMIT)))
        name = _required(fields, "lora_name")
        adapter = await self._service.loaded().adapters.unload(name)
        return json_response({"status": "unloaded", **_shown(adapter)})

    async def adapters(self, _request: web.Request) -> web.Response:
        """All adapters in memory."""
        config = self._service.config.model
        return json_response(
            {
                "max_loras": config.max_loras,
                "max_lora_rank": config.max_lora_rank,
                "adapters": [_shown(adapter) for adapter in self._service.loaded().adapters],
            }
        )


def _required(fields: Fields, name: str) -> str:
    text = fields.text(name)
    if not text:
        raise BadRequest(f"{name!r} is required.", param=name)
    return text


def _shown(adapter: Adapter) -> dict[str, Any]:
    return {
        "name": adapter.info.name,
        "path": adapter.path,
        "revision": adapter.info.revision,
        "rank": adapter.read.rank,
        "bytes": adapter.read.n_bytes,
        "base_model": adapter.read.base or None,
        "loaded_at": adapter.loaded_at,
        "requests": adapter.requests,
        "state": "leaving" if adapter.leaving else "served",
    }
