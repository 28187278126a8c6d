"""The public listener's document."""

from __future__ import annotations

from dataclasses import replace

from gateway.app import GENERATE, MODEL, MODELS, OTHER_V1, RELAYED
from gateway.openapi import OPENAPI
from gateway.openapi.answers import GENERATED, READS
from gateway.openapi.parts import (
    ANSWER_HEADERS,
    EVENTS,
    JSON,
    Operation,
    Routes,
    assembled,
    parameters,
)
from gateway.openapi.requests import REQUESTS
from gateway.openapi.schemas import TEXT, Schema, ref
from gateway.stored import STORED
from shared import dialogue
from shared.openai import RouteKind

TEXT_OF = {
    "/v1/responses": "OpenAI's Responses, for engines that serve it",
    "/v1/messages": "Anthropic's Messages, for engines that serve it",
    "/v1/embeddings": "Embeddings",
    "/v1/rerank": "Documents by relevance",
    "/v1/score": "Scores of pairs of texts",
    "/tokenize": "Tokens of a text or of messages, in vLLM's form",
    "/detokenize": "Text of tokens",
}
_GENERATION_ERRORS = (400, 401, 404, 405, 408, 413, 415, 429, 500, 502, 503, 504)
_RELAY_ERRORS = (400, 401, 404, 405, 408, 413, 429, 500, 502, 503, 504)
_ANY = {"*/*": {"description": "As the worker answers."}}
_FIRST = ("x-request-id", "x-headwater-session", "x-headwater-priority", "x-headwater-timeout")


def routes() -> Routes:
    """All of the public listener."""
    return {**_generation(), **_relayed(), **_stored(), **_reads()}


def _generation() -> Routes:
    made: Routes = {}
    for path, kind in GENERATE.items():
        chat = kind is RouteKind.CHAT
        made["POST", path] = Operation(
            summary="A chat completion" if chat else "A text completion",
            description="Goes to the worker where it costs the fewest seconds. With `stream` the "
            "answer is a stream of events that ends with `data: [DONE]`.",
            body=ref("ChatRequest" if chat else "CompletionRequest"),
            answer={JSON: ref("Chat" if chat else "Completion"), EVENTS: TEXT},
            answer_text="As the worker answers.",
            headers=tuple(ANSWER_HEADERS),
            parameters=parameters(),
            errors=_GENERATION_ERRORS,
            tag="generation",
        )
    return made


def _relayed() -> Routes:
    made: Routes = {}
    for path in sorted(RELAYED):
        made["POST", path] = _dialogue(path) if path in dialogue.ROUTES else _relay(TEXT_OF[path])
    anything = _relay("Any other POST below /v1/")
    name = {"name": "path", "in": "path", "required": True, "schema": TEXT}
    name["description"] = "May hold slashes, but no empty and no dot segment."
    anything.parameters.insert(0, name)
    made["POST", OTHER_V1.replace("*", "{path}")] = anything
    return made


def _relay(summary: str) -> Operation:
    return Operation(
        summary=summary,
        description="Passed on to a worker that has the model, balanced by load.",
        body=ref("Relayed"),
        answer=dict(_ANY),
        answer_text="As the worker answers.",
        headers=tuple(ANSWER_HEADERS),
        parameters=parameters((*_FIRST, "traceparent")),
        errors=_RELAY_ERRORS,
        tag="relayed",
    )


def _dialogue(path: str) -> Operation:
    return replace(
        _relay(TEXT_OF[path]),
        description="Passed on to a worker that has the model, where it costs the fewest seconds; "
        "what workers hold of such prompts is learned from their text. What goes on from an "
        "earlier response (`previous_response_id`) goes to the worker that gave it.",
        parameters=parameters(),
    )


def _stored() -> Routes:
    texts = {
        ("GET", "/v1/responses/{id}"): "A stored response",
        ("DELETE", "/v1/responses/{id}"): "Delete a stored response",
        ("GET", "/v1/responses/{id}/input_items"): "What it was an answer to",
        ("POST", "/v1/responses/{id}/cancel"): "End a response that is being made",
    }
    named = {"name": "id", "in": "path", "required": True, "schema": TEXT}
    return {
        (method, path): replace(
            _relay(texts[method, path]),
            body=None,
            description="Passed on to the worker that gave the response.",
            parameters=[named, *parameters((*_FIRST, "traceparent"))],
        )
        for path, methods in STORED.items()
        for method in methods
    }


def _reads() -> Routes:
    found = {"description": "No request can be served now; `reasons` say why."}
    unready: Schema = {**found, "content": {JSON: {"schema": ref("Readiness")}}}
    name = {"name": "id", "in": "path", "required": True, "schema": TEXT}
    tag = "looking"
    own = ("x-request-id",)
    return {
        ("GET", MODELS): Operation(
            "Models and adapters of all live workers",
            {JSON: ref("Models")}, errors=(401, 405), headers=own, tag=tag,
        ),
        ("GET", MODEL): Operation(
            "One of them",
            {JSON: ref("Model")}, errors=(401, 404, 405), parameters=[name], headers=own, tag=tag,
        ),
        ("GET", "/health"): Operation(
            "Is the process alive", {JSON: ref("Alive")},
            errors=(405,), headers=own, security=[], tag=tag,
        ),
        ("GET", "/ready"): Operation(
            "Can a request be served", {JSON: ref("Readiness")},
            errors=(405,), headers=own, more={"503": unready}, security=[], tag=tag,
        ),
        ("GET", OPENAPI): Operation(
            "This document", {JSON: {"type": "object"}}, errors=(401, 405), headers=own, tag=tag,
        ),
    }  # fmt: skip


def document() -> Schema:
    """The whole of it."""
    text = (
        "One OpenAI-compatible endpoint before many workers. Every route but `/health` and "
        "`/ready` needs a key once the gateway has keys. Errors always have the form of `Error`; "
        "those of workers pass as they are if they have it, too. The `x-headwater-*` answer "
        "headers can be switched off (`[listen] headers`)."
    )
    security = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    schemas = {**REQUESTS, **GENERATED, **READS}
    return assembled("Headwater", text, "http://127.0.0.1:8000", routes(), schemas, security)
