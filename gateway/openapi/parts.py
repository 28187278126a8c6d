"""What many routes share: errors, headers, and how an operation is put together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.openapi.schemas import COUNT, NUMBER, TEXT, WHOLE, Schema, maybe, obj, ref, said
from shared.errors import ApiError

VERSION = "1"
"""Of the interface; it changes when something that is here goes or means something else."""
JSON, EVENTS = "application/json", "text/event-stream"

RETRY_AFTER = (429, 503)
"""Statuses whose answers say when to come back."""


def error_classes() -> dict[int, type[ApiError]]:
    """One class per status that the gateway itself answers with: the most general."""
    found: dict[int, type[ApiError]] = {500: ApiError}
    todo = list(ApiError.__subclasses__())
    while todo:
        kind = todo.pop(0)
        found.setdefault(kind.status, kind)
        todo += kind.__subclasses__()
    return dict(sorted(found.items()))


def error_schema() -> Schema:
    """The one form of all errors."""
    types = sorted({kind.type for kind in error_classes().values()})
    inner = obj(
        {
            "message": said(TEXT, "For people."),
            "type": {"type": "string", "description": f"Of the gateway: {', '.join(types)}."},
            "param": said(maybe(TEXT), "The field or header to blame, if one is."),
            "code": {
                "type": ["string", "integer", "null"],
                "description": "For programs, e.g. `model_not_found`, `context_length_exceeded`.",
            },
        }
    )
    return obj({"error": inner})


def error_texts() -> dict[int, str]:
    """What each status means, from the documentation of its class."""
    texts: dict[int, str] = {}
    for status, kind in error_classes().items():
        words = " ".join((kind.__doc__ or "").split()).replace("``", "`")
        text = words.removeprefix(f"{status}").partition(";")[0].lstrip(": ").rstrip(".")
        texts[status] = text[:1].upper() + text[1:]
    texts[405] = "The route does not take this method"
    texts[500] = "A fault of the gateway; its log has it"
    return texts


def error_answers() -> dict[str, Schema]:
    """Components: ``Error400`` and so on."""
    answers: dict[str, Schema] = {}
    for status, text in error_texts().items():
        headers = {"Retry-After": {"$ref": "#/components/headers/RetryAfter"}}
        answers[f"Error{status}"] = {
            "description": f"{text}.",
            **({"headers": headers} if status in RETRY_AFTER else {}),
            "content": {JSON: {"schema": ref("Error")}},
        }
    return answers


HEADERS: dict[str, Schema] = {
    "RequestId": {
        "description": "The client's own `x-request-id` if it is plain, else one of the gateway's.",
        "schema": TEXT,
    },
    "RetryAfter": {"description": "Seconds until it would pass.", "schema": COUNT},
    "Worker": {"description": "Id of the worker that gave the answer.", "schema": TEXT},
    "Policy": {"description": "The rule by which it was chosen.", "schema": TEXT},
    "PromptTokens": {"description": "Tokens of the prompt; 0: not known.", "schema": COUNT},
    "MatchedTokens": {
        "description": "Tokens that were expected to be cached there. What the engine really "
        "reused stands in `usage.prompt_tokens_details.cached_tokens`.",
        "schema": COUNT,
    },
    "Attempts": {"description": "Workers that were tried, this one included.", "schema": COUNT},
}
"""Components; keys of ``ANSWER_HEADERS`` are the names on the wire."""

ANSWER_HEADERS = {
    "x-request-id": "RequestId",
    "x-headwater-worker": "Worker",
    "x-headwater-policy": "Policy",
    "x-headwater-prompt-tokens": "PromptTokens",
    "x-headwater-matched-tokens": "MatchedTokens",
    "x-headwater-attempts": "Attempts",
}

PARAMETERS: dict[str, Schema] = {
    "x-request-id": said(
        TEXT, "Echoed if it is 1 to 128 of `A-Z a-z 0-9 . _ : -`; never used as a key."
    ),
    "x-headwater-session": said(
        TEXT, "Groups requests of one conversation, for the policy `session` and for traces."
    ),
    "x-headwater-priority": said(
        WHOLE,
        "Who goes first while no worker has room: lower is more urgent, as in vLLM; 0 by default.",
    ),
    "x-headwater-timeout": said(
        {**NUMBER, "exclusiveMinimum": 0},
        "Seconds that the request may take in all; what cannot begin in time is refused at once.",
    ),
    "x-headwater-policy": said(
        TEXT, "Another routing policy for this request, if `[routing] allow_policy_header` is set."
    ),
    "traceparent": said(TEXT, "W3C trace context; it is continued."),
}


def parameters(names: Iterable[str] = PARAMETERS) -> list[Schema]:
    """Request headers as references."""
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


def parameter_components() -> dict[str, Schema]:
    """Request headers."""
    return {
        name: {
            "name": name,
            "in": "header",
            "required": False,
            "description": schema["description"],
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for name, schema in PARAMETERS.items()
    }


def headers_of(names: Iterable[str]) -> dict[str, Schema]:
    """Response headers as references."""
    return {name: {"$ref": f"#/components/headers/{ANSWER_HEADERS[name]}"} for name in names}


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    summary: str
    answer: Mapping[str, Schema]
    """By content type, of status 200."""
    answer_text: str = "Done."
    body: Schema | None = None
    errors: tuple[int, ...] = ()
    parameters: list[Schema] = field(default_factory=list)
    headers: tuple[str, ...] = ()
    description: str = ""
    more: Mapping[str, Schema] = field(default_factory=dict)
    """Other answers, by status."""
    security: list[dict[str, list[str]]] | None = None
    tag: str = ""

    def encoded(self, operation_id: str) -> Schema:
        """The OpenAPI form."""
        responses: dict[str, Schema] = {
            "200": {
                "description": self.answer_text,
                **({"headers": headers_of(self.headers)} if self.headers else {}),
                "content": {kind: {"schema": schema} for kind, schema in self.answer.items()},
            },
            **self.more,
        }
        for status in self.errors:
            responses[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
        encoded: Schema = {
            "operationId": operation_id,
            "tags": [self.tag],
            "summary": self.summary,
            "responses": dict(sorted(responses.items())),
        }
        if self.description:
            encoded["description"] = self.description
        if self.parameters:
            encoded["parameters"] = self.parameters
        if self.body is not None:
            encoded["requestBody"] = {"required": True, "content": {JSON: {"schema": self.body}}}
        if self.security is not None:
            encoded["security"] = self.security
        return encoded


Routes = dict[tuple[str, str], Operation]
"""(method, path) -> what it does."""


def assembled(
    title: str, text: str, server: str, routes: Routes, schemas: dict[str, Schema], security: Any
) -> Schema:
    """A whole document."""
    paths: dict[str, Schema] = {}
    for (method, path), operation in routes.items():
        words = path.replace("{", "").replace("}", "").strip("/").replace("/", "_")
        made = operation.encoded(f"{method.lower()}_{words.replace('.', '_')}")
        paths.setdefault(path, {})[method.lower()] = made
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": VERSION,
            "description": text,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": server}],
        "security": [{}, *({name: []} for name in security)],
        "paths": paths,
        "components": {
            "schemas": dict(sorted({"Error": error_schema(), **schemas}.items())),
            "responses": error_answers(),
            "parameters": parameter_components(),
            "headers": HEADERS,
            "securitySchemes": security,
        },
    }
