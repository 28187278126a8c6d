"""E02: the key covers every route, however it is written; a route that nobody listed fails here.

Listed are the paths of G's two listeners (all that its sources name) and of E's two (what its
applications have). Keys are checked before a path is looked at, which the disguises show.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from rig import CHAT, Reply, ask, chat

from gateway import admin, adminindex, app
from gateway.dashboard import pages
from worker.admin import admin_app
from worker.config import ServeConfig, WorkerConfig
from worker.server import WorkerServer

KEY, TOKEN = "sk-one", "the-admin-token"
BEARER = ("Authorization", f"Bearer {KEY}")
OPEN = {"/health", "/ready"}
PUBLIC = {
    *OPEN,
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize"),
    *("/v1/models", "/v1/models/{id}", "/v1/*", "/v1/"),
    *("/v1/responses/{id}", "/v1/responses/{id}/input_items", "/v1/responses/{id}/cancel"),
    "/openapi.json",
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}
ADMIN = {
    *("/metrics", "/health", "/openapi.json"),
    *("/admin/workers", "/admin/explain", "/admin/report", "/admin/index"),
    *("/dashboard", "/dashboard/events", "/dashboard/state", "/admin/requests"),
}
PARTS = {"/who", "/flush", "/", "/app.js", "/app.css", "/drain", "/undrain"}
"""Ends of paths whose beginning is one of the above."""
WORKER = {
    ("GET", "/health"): "open",
    ("GET", "/ready"): "open",
    ("GET", "/metrics"): "open",
    ("GET", "/v1/models"): "key",
    ("GET", "/v1/models/{id}"): "key",
    ("POST", "/tokenize"): "key",
    ("POST", "/detokenize"): "key",
    ("GET", "/headwater/info"): "key",
    ("GET", "/headwater/load"): "key",
    ("GET", "/headwater/tokenizer"): "key",
    ("GET", "/headwater/events"): "key",
    ("POST", "/v1/chat/completions"): "key",
    ("POST", "/v1/completions"): "key",
}
WORKER_ADMIN = {
    ("GET", "/admin/cache"),
    ("POST", "/admin/cache/flush"),
    ("GET", "/admin/adapters"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
}
DISGUISES = (
    "//v1/chat/completions",
    "/V1/chat/completions",
    "/v1/chat/completions/",
    "/v1/%63hat/completions",
    "/v1/chat%2fcompletions",
    "/v1/chat/completions;x=1",
    "/v1/chat/completions?x=/health",
    "/x/../v1/models",
    "/health/../v1/models",
    "/health/",
    "//health",
    "/health%00",
    "/health/v1/models",
    "/ready;/v1/models",
    "/v1/models#/health",
    "http://h/v1/models",
    "*",
    "/",
)
METHODS = ("GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH")


def paths_named(module: Any) -> Iterator[str]:
    """Every text in a module's code that looks like a path; not what its documentation says."""
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and value.startswith("/") and len(value.split()) == 1:
            yield value


def test_the_gateways_sources_name_no_route_that_is_not_listed() -> None:
    assert set(paths_named(app)) <= PUBLIC | {"/"}
    named = {path for module in (admin, adminindex, pages) for path in paths_named(module)}
    assert named <= ADMIN | PARTS
    named = {*app.GENERATE, *app.RELAYED, *app.READS, *app.STORED, *app.OPERATORS}
    assert named | {app.OTHER_V1, "/v1/"} == PUBLIC
    assert app.OPEN == OPEN


def refused(reply: Reply, method: str, what: Any) -> None:
    """401 as a JSON error; 400 for what is no HTTP, or names no path."""
    assert reply.status in (400, 401), (what, reply.status)
    if reply.status == 401:
        assert reply.header("www-authenticate"), what
    if method != "HEAD":
        assert reply.json["error"]["message"]


def concrete(path: str) -> str:
    return path.replace("{id}", "m").replace("*", "anything")


async def bare(url: str, method: str, target: str, *headers: tuple[str, str]) -> Reply:
    """A HEAD's answer announces a body that does not come, so only its head is looked at."""
    if method != "HEAD":
        body = chat() if method in ("POST", "PUT", "PATCH") else None
        return await ask(url, target, body, *headers, method=method)
    reply = await ask(url, target, None, *headers, method=method, bodyless=True)
    assert reply.body == b""
    return reply


@pytest.mark.parametrize("key", ["none", "wrong", "empty", "the admin's"])
async def test_the_gateways_public_listener(stub, serve, key: str) -> None:
    worker = await stub()
    settings = {"listen.api_keys": KEY, "listen.admin_token": TOKEN}
    served = await serve(worker, **settings)
    headers = {
        "none": (),
        "wrong": (("Authorization", "Bearer sk-on"),),
        "empty": (("Authorization", "Bearer "), ("x-api-key", "")),
        "the admin's": (("Authorization", f"Bearer {TOKEN}"),),
    }[key]
    for target in (*map(concrete, sorted(PUBLIC - OPEN)), *DISGUISES, "/metrics", "/admin/workers"):
        for method in METHODS:
            reply = await bare(served.url, method, target, *headers)
            refused(reply, method, (method, target))
    assert worker.seen == []
    for path in OPEN:
        assert (await ask(served.url, path, None, *headers)).status == 200
    assert (await ask(served.url, CHAT, chat(), BEARER)).status == 200
    assert (await ask(served.url, "/v1/models", None, ("x-api-key", KEY))).status == 200


async def test_the_gateways_admin_listener(stub, serve) -> None:
    served = await serve(await stub(), **{"listen.admin_token": TOKEN})
    targets = {*ADMIN, *(f"/admin/workers/w{part}" for part in PARTS), "/admin/index/who"}
    targets |= {"/admin/index/flush", "/dashboard/app.js", "/admin/requests/x", "/x/../metrics"}
    for target in sorted(targets | {"//metrics", "/metrics/", "/%6detrics", "/x", "/"}):
        for method in METHODS:
            refused(await bare(served.admin, method, target), method, (method, target))
    known = ("Authorization", f"Bearer {TOKEN}")
    assert (await ask(served.admin, "/metrics", None, known)).status == 200


def routes_of(application: web.Application) -> set[tuple[str, str]]:
    """(method, path) of an application, without the HEAD that comes with a GET."""
    return {
        (route.method, route.resource.canonical)
        for route in application.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


async def test_the_workers_listeners() -> None:
    serve_config = ServeConfig(api_keys=(KEY,), admin_token=TOKEN)
    server = WorkerServer(WorkerConfig(serve=serve_config), announce=lambda _: None)
    public, behind = server._public_app(), admin_app(server._service)
    assert routes_of(public) == set(WORKER)
    assert routes_of(behind) == WORKER_ADMIN
    listed = {concrete(path) for (_, path), kind in WORKER.items() if kind == "key"}
    odd = {target for target in DISGUISES if target.startswith("/")}
    for application, targets in (
        (public, listed | odd | {path for _, path in WORKER_ADMIN}),
        (behind, {path for _, path in WORKER_ADMIN} | listed | {"/", "/metrics", "/health"}),
    ):
        async with TestServer(application) as listener:
            base = str(listener.make_url("")).rstrip("/")
            for target in sorted(targets):
                for method in METHODS:
                    refused(await bare(base, method, target), method, (method, target))


async def test_what_is_open_on_a_worker() -> None:
    server = WorkerServer(WorkerConfig(serve=ServeConfig(api_keys=(KEY,))), announce=lambda _: None)
    async with TestClient(TestServer(server._public_app())) as client:
        for (method, path), kind in WORKER.items():
            if kind == "open":
                answer = await client.request(method, path)
                assert answer.status in (200, 503), path
                assert b"key is required" not in await answer.read()
