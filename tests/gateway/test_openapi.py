"""The OpenAPI documents say what the code does: routes, requests that are refused, valid form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from depth import DEPTH
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway import app
from gateway.openapi import document
from gateway.openapi.requests import SHARED
from gateway.openapi.write import documents, encoded
from shared.checks import CHECKS
from shared.errors import BadRequest
from shared.openai import RouteKind, parse

DOCUMENTS: dict[str, dict[str, Any]] = {
    "public": json.loads(document("public")),
    "admin": json.loads(document("admin")),
}
PUBLIC = DOCUMENTS["public"]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": PUBLIC["components"]}
    )


REQUESTS = {
    RouteKind.CHAT: validator("ChatRequest"),
    RouteKind.COMPLETIONS: validator("CompletionRequest"),
}


def parsed(kind: RouteKind, body: dict[str, Any]) -> bool:
    try:
        parse(kind, json.dumps(body).encode())
    except BadRequest:
        return False
    return True


@pytest.mark.parametrize("which", DOCUMENTS)
def test_the_shipped_document_is_what_the_code_says(which: str) -> None:
    shipped = document(which).decode()  # type: ignore[arg-type]
    assert shipped == encoded(documents()[which]), "run `make docs`"


@pytest.mark.parametrize("which", DOCUMENTS)
def test_it_is_valid_openapi(which: str) -> None:
    errors = list(OpenAPIV31SpecValidator(DOCUMENTS[which]).iter_errors())
    assert not errors, [error.message for error in errors]


def test_it_has_the_public_listeners_routes_and_no_other() -> None:
    posts = {path for path, told in PUBLIC["paths"].items() if "post" in told}
    gets = {path for path, told in PUBLIC["paths"].items() if "get" in told}
    stored = {path for path, methods in app.STORED.items() if "GET" in methods}
    cancel = {path for path, methods in app.STORED.items() if "POST" in methods}
    assert posts == {*app.GENERATE, *app.RELAYED, *cancel, "/v1/{path}"}
    assert gets == app.READS | stored
    unlocked = {path for path in gets if PUBLIC["paths"][path]["get"].get("security") == []}
    assert unlocked == app.OPEN
    for path, told in PUBLIC["paths"].items():
        assert len(told) == len(app.STORED.get(path, ("one",)))


def test_every_field_that_is_checked_is_described_and_no_other() -> None:
    assert SHARED.keys() == CHECKS.keys()


VALUES: list[Any] = [None, True, 0, 1, -1, 1.5, "x", "", [], ["a"], [1], [{}], {}, {"a": 1}]


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("kind", RouteKind)
def test_the_parser_and_the_schema_refuse_the_same_values(kind: RouteKind, name: str) -> None:
    base = CHAT if kind is RouteKind.CHAT else {"prompt": "hi"}
    for value in (*VALUES, {"include_usage": 1}, {"include_usage": None}):
        body = {**base, name: value}
        assert REQUESTS[kind].is_valid(body) == parsed(kind, body), (name, value)


WORDS = st.sampled_from(["", "x", "text", "image_url"])
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-2, 2**32), WORDS)
PARTS = st.fixed_dictionaries({}, optional={"type": LEAVES, "text": LEAVES})
CONTENT = st.one_of(LEAVES, st.lists(st.one_of(LEAVES, PARTS), max_size=2))
MESSAGES = st.fixed_dictionaries(
    {}, optional={"role": LEAVES, "content": CONTENT, "tool_calls": CONTENT}
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.one_of(LEAVES, st.lists(st.one_of(LEAVES, MESSAGES), max_size=2)),
        "prompt": st.one_of(LEAVES, st.lists(st.one_of(LEAVES, st.lists(LEAVES, max_size=2)))),
        "add_generation_prompt": LEAVES,
        "continue_final_message": LEAVES,
    },
)


@pytest.mark.parametrize("kind", RouteKind)
@settings(max_examples=30 * DEPTH)
@given(body=BODIES)
def test_whatever_is_sent_is_judged_alike(kind: RouteKind, body: dict[str, Any]) -> None:
    assert REQUESTS[kind].is_valid(body) == parsed(kind, body)
