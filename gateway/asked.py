"""A request that somebody asks about instead of sending it: read as if it had come in.

Beside the request's own fields its body may hold ``route`` (a path, or its last part) and
``tenant``: whose request it would be. Where tenants are kept apart nobody's prompt is found without
it. Where ``route`` is left out the fields tell it, see :func:`_route`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway import relayedbodies, work
from gateway.app import GENERATE
from gateway.config import GatewayConfig
from gateway.exchange import Inbound
from gateway.httpserver import json_body, read_body
from gateway.prompts import Prompt, Prompts
from gateway.router import Router
from gateway.routing.base import key_tokens
from gateway.tenancy import Tenants
from gateway.work import Work
from shared import dialogue, openai
from shared.blocks import GRANULE
from shared.errors import BadRequest
from shared.openai import RouteKind
from shared.types import RequestId, WorkerId

MAX_BODY = 64 * 2**20


ROUTES = (*GENERATE, *sorted(dialogue.ROUTES))
_NAMES = {
    **{route: route for route in ROUTES},
    **{kind.value: route for route, kind in GENERATE.items()},
    **{route.removeprefix("/v1/"): route for route in sorted(dialogue.ROUTES)},
}
Giver = Callable[[str, str], Awaitable[WorkerId | None]]
"""``await giver(tenant, response)``: the worker that gave a response, if that is known."""


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
        giver: Giver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._router, self._prompts = config, router, prompts
        self.tenants, self._giver, self._clock = tenants, giver, clock

    async def read(self, request: web.BaseRequest) -> Asked:
        """The body of an admin request. Raises ``ApiError``."""
        body = await read_body(request, MAX_BODY)
        fields: dict[str, Any] = json_body(body)
        inbound = Inbound(
            request_id=RequestId("explain"),
            route=_route(fields),
            target="",
            headers=request.headers,
            body=body,
            arrived=self._clock(),
            wall_at=0.0,
            tenant=self._tenant(fields),
        )
        kind = GENERATE.get(inbound.route)
        if kind is None:
            return await self._dialogue(inbound)
        return await self._generation(inbound, kind)

    async def _generation(self, inbound: Inbound, kind: RouteKind) -> Asked:
        parsed = self.tenants.scoped(inbound.tenant, openai.parse(kind, inbound.body))
        profile = self._router.profile(parsed.model) if parsed.model else None
        prompt = await self._prompts.read(parsed, profile) if profile is not None else None
        item = work.generation(inbound, parsed, prompt, self._config)
        view = self._view(item, parsed.model)
        if profile is not None:
            view["tokenizer"] = profile.tokenizer
            view["tokenizer_missing"] = self._prompts.missing(profile)
        return Asked(item, view)

    async def _dialogue(self, inbound: Inbound) -> Asked:
        model = relayedbodies.model_of(inbound, self._router.base_models())
        asked = dialogue.read(inbound.route, inbound.body)
        salt = self.tenants.salt(inbound.tenant, asked.salt)
        profile = self._router.profile(model)
        prompt = Prompt()
        if profile is not None:
            prompt = self._prompts.read_text(asked.text, profile, salt)
        item = work.dialogue(inbound, model, asked, prompt, self._config)
        view = self._view(item, model)
        if asked.previous:
            giver = await self._giver(inbound.tenant, asked.previous)
            if giver is not None:
                item.elsewhere = self._router.others(model, giver)
            view["previous_worker"] = giver
        return Asked(item, view)

    def _view(self, item: Work, model: str | None) -> dict[str, Any]:
        return {
            "model": model,
            "route": item.inbound.route,
            "prompt_tokens": item.query.prompt_tokens,
            "blocks": key_tokens(item.query) // GRANULE,
            "block_tokens": GRANULE,
            "tenant": item.inbound.tenant,
            "tenant_missing": self.tenants.isolating and not item.inbound.tenant,
        }

    def _tenant(self, fields: dict[str, Any]) -> str:
        name = fields.get("tenant", "")
        if not isinstance(name, str) or (name and not self.tenants.known(name)):
            raise BadRequest("'tenant' must be the name of a tenant.", param="tenant")
        return name


def _route(fields: dict[str, Any]) -> str:
    """Where the request would be sent.

    A chat and a message of Anthropic's look alike, but a chat has no ``system`` beside its
    ``messages``: a message without one has to be named.
    """
    named = fields.get("route")
    if named is not None:
        if not isinstance(named, str) or named not in _NAMES:
            raise BadRequest(f"'route' must be one of {', '.join(_NAMES)}.", param="route")
        return _NAMES[named]
    if "messages" in fields:
        return dialogue.MESSAGES if "system" in fields else "/v1/chat/completions"
    # "prompt" names a stored one in Responses.
    if "input" in fields or "previous_response_id" in fields:
        return dialogue.RESPONSES
    return "/v1/completions"
