"""JSON schemas out of the types that answers are made of. Pure."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any

import msgspec

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"


def ref(name: str) -> Schema:
    """A schema that stands among the components."""
    return {"$ref": REF.format(name=name)}


def of_types(types: Iterable[type]) -> dict[str, Schema]:
    """Components of dataclasses, structs and enums, by name, those they refer to included.

    Answers carry every field, so all are required; what a field means is the text below it in the
    source.
    """
    kinds = list(types)
    _, components = msgspec.json.schema_components(kinds, ref_template=REF)
    named = {kind.__name__: kind for kind in kinds}
    for name, schema in components.items():
        schema.pop("title", None)
        if "description" in schema:
            schema["description"] = plain(schema["description"])
        if "properties" in schema:
            _complete(schema, attribute_texts(named[name]) if name in named else {})
        elif "enum" in schema:
            schema["type"] = "string"
    return dict(components)


def _complete(schema: Schema, texts: dict[str, str]) -> None:
    schema["required"] = list(schema["properties"])
    for name, field in schema["properties"].items():
        field.pop("default", None)
        if name in texts:
            field["description"] = texts[name]


def attribute_texts(kind: type) -> dict[str, str]:
    """The documentation below each attribute of a class and of its bases."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if not cls.__module__.startswith(("gateway.", "shared.")):
            continue
        [body] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
                continue
            if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = plain(text.value.value)
    return found


def plain(text: str) -> str:
    """Documentation as Markdown on one line a paragraph."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs).replace("``", "`")


def obj(properties: dict[str, Schema], *, required: Iterable[str] | None = None) -> Schema:
    """An object; all its properties are required unless told otherwise."""
    names = list(properties if required is None else required)
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": names} if names else schema


def listed(items: Schema) -> Schema:
    """An array."""
    return {"type": "array", "items": items}


def maybe(schema: Schema) -> Schema:
    """The same, or null."""
    if set(schema) == {"type"}:
        return {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def said(schema: Schema, text: str) -> Schema:
    """The same with a description."""
    return {**schema, "description": text}


TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
COUNT: Schema = {"type": "integer", "minimum": 0}
