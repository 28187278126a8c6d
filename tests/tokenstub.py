"""An engine of another make that tokenises over HTTP, each in its own form, right or wrong.

stub = await TokenStub.start(form="vllm", bundle=byte_bundle())
stub.twist = lambda tokens: [256, *tokens]     # what it does to each chat's tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from shared.bundle import TokenizerBundle
from shared.bytetok import IM_START, byte_bundle
from shared.errors import BadRequest
from shared.load import WorkerInfo
from shared.openai import RouteKind, parse
from shared.render import Renderer

OTHER_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def bos_bundle() -> TokenizerBundle:
    """The byte tokenizer with ``<|im_start|>`` as BOS, which its template does not write."""
    return msgspec.structs.replace(byte_bundle(), bos_token=IM_START)


_RENDERERS: dict[str, Renderer] = {}


def renderer_of(bundle: TokenizerBundle) -> Renderer:
    """Made once: proving a tokenizer takes a while."""
    key = bundle.fingerprint
    if key not in _RENDERERS:
        _RENDERERS[key] = Renderer(bundle)
    return _RENDERERS[key]


@dataclass(eq=False)
class TokenStub:
    """Listens on loopback; ``asked`` are the paths of its POSTs."""

    form: str = "vllm"
    bundle: TokenizerBundle = field(default_factory=byte_bundle)
    routes: bool = True
    """False: it has no route that tokenises."""
    twist: Callable[[list[int]], list[int]] = list
    """Of chats."""
    chats: bool = True
    """False: /tokenize takes no ``messages``."""
    delay_s: float = 0.0
    asked: list[str] = field(default_factory=list)
    cached: int | None = None
    """``cached_tokens`` of each completion after the first; None: not reported."""
    date: str | None = None
    """Its Date header, if not the true one."""
    url: str = ""
    _runner: web.AppRunner | None = None

    @classmethod
    async def start(cls, **settings: Any) -> TokenStub:
        stub = cls(**settings)
        await stub.listen()
        return stub

    @property
    def info(self) -> WorkerInfo:
        """As a gateway knows it."""
        return WorkerInfo(
            self.url.removeprefix("http://"),
            1,
            self.url,
            ("m",),
            engine=self.form,
            tokenizer=self.bundle.fingerprint,
        )

    async def listen(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        if self.routes:
            for path in self._paths():
                app.router.add_post(path, self._tokens)
        if self.date is not None:
            app.on_response_prepare.append(self._redate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def _paths(self) -> list[str]:
        return {
            "llamacpp": ["/tokenize", "/apply-template"],
            "tgi": ["/tokenize", "/chat_tokenize"],
        }.get(self.form, ["/tokenize"])

    async def _redate(self, request: web.Request, response: web.StreamResponse) -> None:
        assert self.date is not None
        response.headers["Date"] = self.date

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        body = await request.json()
        try:
            tokens = self._chat(body) if "messages" in body else self._text(body["prompt"])
        except BadRequest as error:
            return web.json_response({"error": {"message": error.message}}, status=400)
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return web.json_response({"id": "c", "choices": [], "usage": usage})

    async def _tokens(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.delay_s:
            time.sleep(self.delay_s)  # noqa: ASYNC251 - an engine that holds everybody up
        body = await request.json()
        try:
            return self._answer(request.path, body)
        except BadRequest as error:
            return web.json_response({"error": {"message": error.message}}, status=400)

    def _answer(self, path: str, body: dict[str, Any]) -> web.Response:
        if self.form == "llamacpp":
            if path == "/apply-template":
                return web.json_response({"prompt": self._rendered(body)})
            tokens = self._text(body.get("content", ""), special=body.get("add_special", False))
            return web.json_response({"tokens": tokens})
        if self.form == "tgi":
            chat = path == "/chat_tokenize"
            tokens = self._chat(body) if chat else self._text(body["inputs"])
            listed = [{"id": t, "text": "", "start": 0, "stop": 1} for t in tokens]
            return web.json_response(
                {"tokenize_response": listed, "templated_text": ""} if chat else listed
            )
        if "messages" in body and not self.chats:
            return web.json_response({"detail": "prompt: Field required"}, status=422)
        tokens = self._chat(body) if "messages" in body else self._text(body["prompt"])
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    def _rendered(self, body: dict[str, Any]) -> str:
        return renderer_of(self.bundle).render_chat(
            parse(RouteKind.CHAT, msgspec.json.encode(body))
        )

    def _chat(self, body: dict[str, Any]) -> list[int]:
        request = parse(RouteKind.CHAT, msgspec.json.encode(body))
        return self.twist(renderer_of(self.bundle).encode_request(request).tokens)

    def _text(self, text: str, *, special: bool = True) -> list[int]:
        return renderer_of(self.bundle).encode_text(text, special)


def with_template(bundle: TokenizerBundle, template: str | None) -> TokenizerBundle:
    """The same tokenizer under another chat template, or none."""
    return msgspec.structs.replace(bundle, chat_template=template)
