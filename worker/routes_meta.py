"""Everything but generation: health, models, tokens, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from shared.aside import aside
from shared.bulk import LARGE_BODY, is_bulky
from shared.errors import BadRequest, ModelNotFound
from shared.openai import GenerateRequest, RouteKind, decode_object, parse
from shared.render import Encoded, Renderer
from worker.adapters import Adapter
from worker.fields import Fields
from worker.service import Loaded, Service
from worker.web import json_response, read_body

OFF_LOOP_BYTES = 32 << 10
"""Texts longer than this are tokenized in a thread."""
OFF_LOOP_TOKENS = 32 << 10
"""So many tokens become text in a thread."""


class MetaRoutes:
    """Handlers that only read."""

    def __init__(self, service: Service, body_limit: int) -> None:
        self._service = service
        self._limit = body_limit

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{id:.+}", self.model)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)

    async def health(self, _request: web.Request) -> web.Response:
        """200 as long as the process can serve, now or later."""
        if self._service.alive():
            return json_response({"status": "ok"})
        return json_response({"status": "dead", "reasons": self._service.reasons()}, status=503)

    async def ready(self, _request: web.Request) -> web.Response:
        """200 if a request can be served now, else 503 with the reasons."""
        reasons = self._service.reasons()
        if not reasons:
            return json_response({"status": "ready", "reasons": []})
        response = json_response({"status": "not ready", "reasons": reasons}, status=503)
        response.headers["Retry-After"] = "1"
        return response

    async def metrics(self, _request: web.Request) -> web.Response:
        """Prometheus text."""
        text = self._service.metrics.text()
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, _request: web.Request) -> web.Response:
        """All names the worker answers to: the model's, then its adapters'."""
        data = [self._card(name) for name in self._service.names]
        if not self._service.loading:
            data += map(self._adapter_card, self._service.loaded().adapters.served())
        return json_response({"object": "list", "data": data})

    async def model(self, request: web.Request) -> web.Response:
        """One of them."""
        name = request.match_info["id"]
        adapter = self._service.adapter(name)
        if adapter is not None:
            return json_response(self._adapter_card(adapter))
        if name not in self._service.names:
            raise ModelNotFound(f"The model {name[:128]!r} does not exist.", param="model")
        return json_response(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "headwater",
            "root": self._service.names[0],
            "parent": None,
        }
        if not self._service.loading:
            card["max_model_len"] = self._service.info().max_model_len
        return card

    def _adapter_card(self, adapter: Adapter) -> dict[str, Any]:
        """As vLLM has it: ``root`` is where it came from, ``parent`` what it belongs to."""
        return {
            **self._card(adapter.info.name),
            "created": int(adapter.loaded_at),
            "root": adapter.path,
            "parent": self._service.names[0],
        }

    async def tokenize(self, request: web.Request) -> web.Response:
        """vLLM's form: ``prompt`` or ``messages`` in, ``tokens`` and their ``count`` out."""
        loaded = self._service.loaded()
        body = await read_body(request, self._limit)
        values = decode_object(body)
        fields = Fields(values)
        self._service.model_name(fields.text("model"))
        strings = fields.flag("return_token_strs")
        if values.get("messages") is not None:
            call = await aside(len(body) > LARGE_BODY, parse, RouteKind.CHAT, body)
            prompt = await aside(is_bulky(call), loaded.renderer.render_chat, call)
            special = call.add_special_tokens
        else:
            text = fields.text("prompt")
            if text is None:
                raise BadRequest("'prompt' or 'messages' is required.", param="prompt")
            prompt, special = text, fields.flag("add_special_tokens", default=True)
        tokens = await encode_text(loaded.renderer, prompt, special=special)
        many = len(tokens) > OFF_LOOP_TOKENS
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": loaded.info.max_model_len,
                "tokens": tokens,
                "token_strs": await aside(many, _pieces, loaded, tokens) if strings else None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """vLLM's form: ``tokens`` in, ``prompt`` out."""
        loaded = self._service.loaded()
        fields = Fields(decode_object(await read_body(request, self._limit)))
        self._service.model_name(fields.text("model"))
        if fields.get("tokens") is None:
            raise BadRequest("'tokens' is required.", param="tokens")
        tokens = fields.token_ids("tokens", loaded.limits.vocab_size)
        many = len(tokens) > OFF_LOOP_TOKENS
        return json_response({"prompt": await aside(many, loaded.renderer.decode, tokens)})


def _pieces(loaded: Loaded, tokens: Sequence[int]) -> list[str | None]:
    """Each token as its vocabulary writes it."""
    return list(map(loaded.renderer.tokenizer.id_to_token, tokens))


async def encode_request(renderer: Renderer, call: GenerateRequest) -> Encoded:
    """Token ids of every prompt; what takes long is done off the event loop."""
    return await aside(renderer.takes_long(call, OFF_LOOP_BYTES), renderer.encode_request, call)


async def encode_text(renderer: Renderer, text: str, *, special: bool) -> list[int]:
    """Token ids of a text; a long one is encoded off the event loop."""
    return await aside(len(text) > OFF_LOOP_BYTES, renderer.encode_text, text, special)
