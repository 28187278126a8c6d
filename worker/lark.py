"""Pieces of grammars in llguidance's Lark dialect. P: only text.

A grammar is rules, one to a line; the answer is what the rule ``start`` derives.
"""

from __future__ import annotations

import msgspec

WHITESPACE = r"[ ]|\n[ \t]{0,32}"
"""What may stand between two parts of a JSON text: a weak model that is free to would go on with
white space until its limit."""


def literal(text: str) -> str:
    """Exactly this text."""
    return msgspec.json.encode(text).decode()


def special(token: int) -> str:
    """Exactly this token, which has no text of its own."""
    return f"<[{token}]>"


def json_of(schema: object) -> str:
    """A JSON text that follows a schema."""
    return f"%json {msgspec.json.encode(with_whitespace(schema)).decode()}"


def with_whitespace(schema: object) -> object:
    """A schema with the bounds on white space that :data:`WHITESPACE` sets."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
