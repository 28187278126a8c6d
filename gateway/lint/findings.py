"""What a check has found, and what to do about it. Pure values."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Cause(StrEnum):
    """Kinds of difference, each with its own remedy."""

    DATE = "date"
    ID = "id"
    NUMBER = "number"
    VALUE = "value"
    ORDER = "order"
    TOOL_ORDER = "tool_order"
    JSON_KEYS = "json_key_order"
    SHUFFLED = "shuffled_lines"
    WHITESPACE = "whitespace"
    ROLE = "role"
    TEMPLATE = "template"


REMEDIES = {
    Cause.DATE: "Put the date or time behind all text that stays the same, or round it (the day "
    "instead of the second), or let the model ask for it through a tool.",
    Cause.ID: "Put the id into the last message or into metadata; nothing that differs by user or "
    "request belongs before text that all share.",
    Cause.NUMBER: "Put the number behind all text that stays the same.",
    Cause.VALUE: "Put what is filled in here (a name, a place) behind all text that stays the "
    "same.",
    Cause.ORDER: "Turn the order round: first the text that requests share, then what differs.",
    Cause.TOOL_ORDER: "Send tools in a fixed order, sorted by name for example.",
    Cause.JSON_KEYS: "Write JSON with sorted keys (sort_keys=True), so that equal values are equal "
    "text.",
    Cause.SHUFFLED: "Keep the lines (documents, examples, rules) in a fixed order.",
    Cause.WHITESPACE: "Make blanks and line ends the same everywhere: one template, stripped.",
    Cause.ROLE: "Use one role for the same text everywhere (system or developer, not both), "
    "and no message of its own here and part of another there.",
    Cause.TEMPLATE: "Write headings, labels, markup and opening sentences the same everywhere: one "
    "template for all callers; what only some of them need belongs behind what all share.",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One place where prompts part. Tokens are estimates where no tokenizer was given."""

    cause: Cause
    part: str
    """``system``, ``tools``, ``user``, ``prompt`` ..."""
    after_tokens: int
    """Shared before the difference, on average."""
    before: str
    """Text just before it."""
    examples: tuple[str, ...]
    """How it reads in some of the prompts."""
    lines: tuple[int, ...]
    """Of the file: some of the prompts."""
    requests: int
    """Prompts that it concerns."""
    lost_tokens: int
    """Computed again because of it, in this file."""
    tokens_per_day: int
    seconds_per_day: float
    """Of prefill."""
    remedy: str


class LintResult(msgspec.Struct, frozen=True, kw_only=True):
    """All of a file."""

    prompts: int
    tokens: int
    """Of the parts that were looked at."""
    requests_per_day: float
    """As told by the times in the file, by the caller, or the file taken as one day."""
    per_day_from: str
    """``times``, ``given`` or ``file``."""
    reused_tokens: int
    """What a prefix cache without limit would have kept."""
    lost_tokens: int
    findings: tuple[Finding, ...]
    """The dearest first."""
