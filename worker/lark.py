"""Pieces of grammars in llguidance's Lark dialect. P: only text.

A grammar is rules, one to a line; the answer is what the rule ``start`` derives.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

OPTIONS = '%llguidance {"no_forcing": true}'
"""First line of every grammar. Were text without a choice forced into the tokens that the tokenizer
makes of it, a text that looks like a special token would become one, and the answer would fail."""

WHITESPACE = r"[ ]|\n[ \t]{0,32}"
"""What may stand between two parts of a JSON text: a weak model that is free to would go on with
white space until its limit."""

ANYTHING = r"(.|\n)*"
NO_BRACE = r"[ \t\r\n]*([^{ \t\r\n](.|\n)*)?"
"""Any text that does not begin like a JSON object."""


def literal(text: str) -> str:
    """Exactly this text."""
    return msgspec.json.encode(text).decode()


def one_of(texts: Iterable[str]) -> str:
    """Rules for one of some texts; as a terminal, or thousands of them would cost seconds."""
    return f"start: CHOICE\nCHOICE: {' | '.join(map(literal, texts))}"


def added(token: int) -> str:
    """Exactly this token, one of those that were added to the tokenizer's own."""
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
