"""HTTP of the emulated engines: what they share, and what each has of its own."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from gateway.emulators import pages
from gateway.emulators.emulator import Emulator, Running
from shared import openai
from shared.errors import ApiError
from shared.openai import GenerateRequest, RouteKind

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(emulator: Emulator) -> web.Application:
    """All routes of one engine."""
    app = web.Application(client_max_size=64 << 20)
    engine = emulator.settings.engine
    app.router.add_get("/health", _fixed(lambda: {"status": "ok"}))
    app.router.add_get("/v1/models", _fixed(lambda: pages.models(emulator)))
    app.router.add_get("/metrics", _metrics(emulator))
    app.router.add_post("/v1/chat/completions", _generate(emulator, RouteKind.CHAT))
    app.router.add_post("/v1/completions", _generate(emulator, RouteKind.COMPLETIONS))
    app.router.add_post("/tokenize", _tokenize(emulator))
    for path, page in pages.OWN[engine].items():
        app.router.add_get(path, _fixed(partial(page, emulator)))
    if engine == "llamacpp":
        app.router.add_post("/apply-template", _apply_template(emulator))
    if engine == "tgi":
        app.router.add_post("/chat_tokenize", _chat_tokenize(emulator))
    return app


def _fixed(value: Callable[[], Any]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        del request
        return web.json_response(value())

    return handle


def _metrics(emulator: Emulator) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(text=pages.METRICS[emulator.settings.engine](emulator))

    return handle


def _parse(kind: RouteKind, body: bytes) -> GenerateRequest:
    try:
        return openai.parse(kind, body)
    except ApiError as error:
        raise web.HTTPBadRequest(
            text=json.dumps(error.body()), content_type="application/json"
        ) from None


def _tokenize(emulator: Emulator) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fields = msgspec.json.decode(body, type=dict[str, Any])
        text = fields.get("content", fields.get("inputs"))
        if isinstance(text, str):
            ids = emulator.renderer.encode_text(text, bool(fields.get("add_special", False)))
        else:
            kind = RouteKind.CHAT if "messages" in fields else RouteKind.COMPLETIONS
            ids = emulator.renderer.encode_request(_parse(kind, body)).tokens
        return web.json_response(pages.tokens(emulator, ids))

    return handle


def _apply_template(emulator: Emulator) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        chat = _parse(RouteKind.CHAT, await request.read())
        return web.json_response({"prompt": emulator.renderer.render_chat(chat)})

    return handle


def _chat_tokenize(emulator: Emulator) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        chat = _parse(RouteKind.CHAT, await request.read())
        listed = pages.tokens(emulator, emulator.renderer.encode_request(chat).tokens)
        text = emulator.renderer.render_chat(chat)
        return web.json_response({"tokenize_response": listed, "templated_text": text})

    return handle


def _generate(emulator: Emulator, kind: RouteKind) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        asked = _parse(kind, await request.read())
        running = await emulator.prefill(asked)
        try:
            if asked.stream:
                response = await _stream(emulator, asked, running, request)
            else:
                async for _ in emulator.decode(running):
                    pass
                response = web.json_response(_whole(emulator, kind, running))
            return response
        finally:
            await emulator.finish(running)

    return handle


def _usage(emulator: Emulator, running: Running) -> dict[str, Any]:
    return pages.usage(emulator, len(running.held.prompt), len(running.answer), running.held.cached)


def _whole(emulator: Emulator, kind: RouteKind, running: Running) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    if kind is RouteKind.CHAT:
        choice["message"] = {"role": "assistant", "content": running.text}
    else:
        choice["text"] = running.text
    return {**_head(emulator, kind, ""), "choices": [choice], **_usage(emulator, running)}


def _head(emulator: Emulator, kind: RouteKind, suffix: str) -> dict[str, Any]:
    name = f"chat.completion{suffix}" if kind is RouteKind.CHAT else "text_completion"
    return {"id": "emulated", "object": name, "created": 0, "model": emulator.settings.model}


async def _stream(
    emulator: Emulator, asked: GenerateRequest, running: Running, request: web.Request
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    head = _head(emulator, asked.kind, ".chunk")
    chat = asked.kind is RouteKind.CHAT

    async def send(choices: list[dict[str, Any]], **more: Any) -> None:
        data = json.dumps({**head, "choices": choices, **more})
        await response.write(f"data: {data}\n\n".encode())

    def choice(text: str, finish: str | None = None) -> dict[str, Any]:
        content = {"delta": {"content": text} if text else {}} if chat else {"text": text}
        return {"index": 0, **content, "finish_reason": finish}

    async for piece in emulator.decode(running):
        await send([choice(piece)])
    await send([choice("", "length")])
    if asked.include_usage:
        await send([], **_usage(emulator, running))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
