"""The admin listener's document."""

from __future__ import annotations

from dataclasses import replace

from gateway.admin import EXPLAIN, WORKERS
from gateway.adminindex import FLUSH, INDEX, WHO
from gateway.dashboard.pages import EVENTS as STREAM
from gateway.dashboard.pages import PAGE, REQUESTS, STATE
from gateway.openapi import OPENAPI
from gateway.openapi.answers import admin_schemas
from gateway.openapi.parts import EVENTS, JSON, Operation, Routes, assembled
from gateway.openapi.schemas import TEXT, Schema, ref

_TEXT, _HTML = "text/plain", "text/html"
_USUAL = (401, 403, 405)
_BODY = (400, 401, 403, 405, 408, 413)
_ID = {"name": "id", "in": "path", "required": True, "schema": TEXT}
_BODY_OF = (
    "The body of a chat, a text completion, a response or a message, as the public listener takes "
    "it. Beside its own fields it may hold `tenant` (whose request it would be) and `route` (where "
    "it would be sent; else told from its fields: `messages` with `system` is a message, without "
    "it a chat; `input` or `previous_response_id` a response; `prompt` a completion)."
)


def routes() -> Routes:
    """All of the admin listener."""
    return {**_workers(), **_questions(), **_watching()}


def _workers() -> Routes:
    change = Operation(
        "", {JSON: ref("Changed")}, errors=(*_USUAL, 404), parameters=[_ID], tag="workers"
    )
    return {
        ("GET", WORKERS): Operation(
            "All workers, those that never answered too, and the lists that name them",
            {JSON: ref("Workers")}, errors=_USUAL, tag="workers",
        ),
        ("POST", WORKERS): Operation(
            "Take a worker in", {JSON: ref("Changed")},
            body=ref("Address"), errors=_BODY, tag="workers",
        ),
        ("DELETE", f"{WORKERS}/{{id}}"): replace(change, summary="Let a worker go"),
        ("POST", f"{WORKERS}/{{id}}/drain"): replace(
            change, summary="Send it no new requests; running answers finish"
        ),
        ("POST", f"{WORKERS}/{{id}}/undrain"): replace(change, summary="Undo that"),
    }  # fmt: skip


def _questions() -> Routes:
    generation = ref("Generation")
    return {
        ("POST", EXPLAIN): Operation(
            "How a request would be routed now, and why; changes nothing", {JSON: ref("Explained")},
            body=generation, errors=_BODY, tag="questions",
        ),
        ("GET", INDEX): Operation(
            "What the index holds", {JSON: ref("IndexStats")}, errors=_USUAL, tag="questions",
        ),
        ("POST", WHO): Operation(
            "Who holds how much of a prompt; changes nothing", {JSON: ref("Who")},
            body=generation, errors=(*_BODY, 404), tag="questions",
        ),
        ("POST", FLUSH): Operation(
            "Forget what is known of a worker's cache", {JSON: ref("Flushed")},
            body=ref("FlushRequest"), errors=(*_BODY, 404), tag="questions",
        ),
        ("GET", "/admin/report"): Operation(
            "Where the prompt tokens went, as `headwater report --format json`",
            {JSON: ref("Report")}, errors=(*_USUAL, 404, 500), tag="questions",
        ),
    }  # fmt: skip


def _watching() -> Routes:
    lines = Operation("The last requests", {JSON: ref("Lines")}, errors=_USUAL, tag="watching")
    return {
        ("GET", "/metrics"): Operation(
            "Prometheus metrics", {_TEXT: TEXT}, errors=_USUAL, tag="watching"
        ),
        ("GET", "/health"): Operation(
            "Is the process alive", {JSON: ref("Alive")}, errors=_USUAL, tag="watching"
        ),
        ("GET", REQUESTS): lines,
        ("GET", f"{REQUESTS}/{{id}}"): Operation(
            "One of them, by the gateway's id or the client's own", {JSON: ref("RequestAttempts")},
            errors=(*_USUAL, 404), parameters=[_ID], tag="watching",
        ),
        ("GET", PAGE): Operation("The live page", {_HTML: TEXT}, errors=_USUAL, tag="watching"),
        ("GET", STATE): Operation(
            "What it shows now", {JSON: ref("State")}, errors=_USUAL, tag="watching"
        ),
        ("GET", STREAM): Operation(
            "The same as server-sent events, one each second", {EVENTS: TEXT},
            errors=(*_USUAL, 503), tag="watching",
        ),
        ("GET", OPENAPI): Operation(
            "This document", {JSON: {"type": "object"}}, errors=_USUAL, tag="watching"
        ),
    }  # fmt: skip


def document() -> Schema:
    """The whole of it."""
    text = (
        "For operators. It listens on loopback unless configured otherwise, and then needs a token "
        "(`[listen] admin_token`); as soon as one is configured every route asks for it. Browsers "
        "give it as a password on the dashboard. With `--processes N` it answers for all of them."
    )
    security = {"bearer": {"type": "http", "scheme": "bearer"}}
    schemas = {
        **admin_schemas(),
        "Generation": {"type": "object", "description": _BODY_OF},
    }
    return assembled("Headwater, admin", text, "http://127.0.0.1:8001", routes(), schemas, security)
