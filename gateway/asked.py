"""A request that somebody asks about instead of sending it: read as if it had come in.

Beside the request's own fields its body may hold ``route`` (a path or a kind) and ``tenant``: whose
request it would be. Where tenants are kept apart nobody's prompt is found without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway import work
from gateway.app import GENERATE
from gateway.config import GatewayConfig
from gateway.exchange import Inbound
from gateway.httpserver import json_body, read_body
from gateway.prompts import Prompts
from gateway.router import Router
from gateway.tenancy import Tenants
from gateway.work import Work
from shared import openai
from shared.blocks import GRANULE
from shared.errors import BadRequest
from shared.openai import RouteKind
from shared.types import RequestId

MAX_BODY = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked about."""

    work: Work
    view: dict[str, Any]
    """The request in JSON terms: its model, size and tokenizer."""


class Asking:
    """Reads requests with the gateway's own tokenizers; sends nothing."""

    def __init__(
        self,
        config: GatewayConfig,
        router: Router,
        prompts: Prompts,
        tenants: Tenants,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._router, self._prompts = config, router, prompts
        self.tenants, self._clock = tenants, clock

    async def read(self, request: web.BaseRequest) -> Asked:
        """The body of an admin request. Raises ``ApiError``."""
        body = await read_body(request, MAX_BODY)
        fields: dict[str, Any] = json_body(body)
        kind, tenant = _kind(fields), self._tenant(fields)
        parsed = self.tenants.scoped(tenant, openai.parse(kind, body))
        profile = self._router.profile(parsed.model) if parsed.model else None
        prompt = await self._prompts.read(parsed, profile) if profile is not None else None
        inbound = Inbound(
            request_id=RequestId("explain"),
            route=f"/v1/{'chat/completions' if kind is RouteKind.CHAT else 'completions'}",
            target="",
            headers=request.headers,
            body=body,
            arrived=self._clock(),
            wall_at=0.0,
            tenant=tenant,
        )
        item = work.generation(inbound, parsed, prompt, self._config)
        view: dict[str, Any] = {
            "model": parsed.model,
            "prompt_tokens": item.query.prompt_tokens,
            "blocks": len(item.query.keys),
            "block_tokens": GRANULE,
            "tenant": tenant,
            "tenant_missing": self.tenants.isolating and not tenant,
        }
        if profile is not None:
            view["tokenizer"] = profile.tokenizer
            view["tokenizer_missing"] = self._prompts.missing(profile)
        return Asked(item, view)

    def _tenant(self, fields: dict[str, Any]) -> str:
        name = fields.get("tenant", "")
        if not isinstance(name, str) or (name and not self.tenants.known(name)):
            raise BadRequest("'tenant' must be the name of a tenant.", param="tenant")
        return name


def _kind(fields: dict[str, Any]) -> RouteKind:
    route = fields.get("route")
    if route is None:
        return RouteKind.CHAT if "messages" in fields else RouteKind.COMPLETIONS
    kinds = {**GENERATE, **{kind.value: kind for kind in RouteKind}}
    if not isinstance(route, str) or route not in kinds:
        raise BadRequest(f"'route' must be one of {', '.join(kinds)}.", param="route")
    return kinds[route]
