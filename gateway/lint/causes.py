"""Why two texts that mean the same are not the same: the kinds of difference. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from enum import StrEnum

from gateway.lint.read import Part, canonical

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_PATTERNS = (
    ("uuid", r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"),
    ("date", r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?\S*)?"),
    ("date", r"\b\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}\b"),
    ("date", rf"\b{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?\b"),
    ("date", rf"\b\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH}(?:,?\s+\d{{4}})?\b"),
    ("date", rf"\b{_DAY}\b(?:,?\s+{_MONTH})?"),
    ("date", r"\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?\s*(?:[ap]\.?m\.?)?"),
    ("date", r"\b1[5-9]\d{8}(?:\d{3}){0,3}\b"),
    ("id", r"\b[\w.+-]+@[\w-]+\.[\w.]+\b"),
    ("id", r"\b(?=[\w-]*\d)(?=[\w-]*[a-z_-])[\w-]{5,}\b"),
    ("id", r"\b[0-9a-f]{8,}\b"),
    ("id", r"\b\d{6,}\b"),
    ("number", r"\d+(?:[.,]\d+)*"),
)
_KINDS = {
    kind: re.compile("|".join(p for name, p in _PATTERNS if name == kind), re.IGNORECASE)
    for kind, _ in _PATTERNS
}
_AROUND = 40
"""Characters beside a difference that may belong to the same date or id."""
_SHORT = 160
"""A difference up to so long is a value that was filled in; a longer one is a text of its own."""


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


def of_parts(one: Part, two: Part) -> Cause | None:
    """Two parts that say the same in another form; None: they say different things, or are equal.

    Parts of the same label only.
    """
    if one.text == two.text:
        return None
    if one.items and two.items:
        if one.items == two.items:
            return Cause.JSON_KEYS
        return Cause.TOOL_ORDER if Counter(one.items) == Counter(two.items) else None
    if one.text.split() == two.text.split():
        return Cause.WHITESPACE
    sorted_text = _sorted_objects(one.text)
    if sorted_text is not None and sorted_text == _sorted_objects(two.text):
        return Cause.JSON_KEYS
    lines = [
        [line.strip() for line in part.text.splitlines() if line.strip()] for part in (one, two)
    ]
    if len(lines[0]) > 2 and lines[0] != lines[1] and Counter(lines[0]) == Counter(lines[1]):
        return Cause.SHUFFLED
    return None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def of_spans(one: str, two: str, span: tuple[int, int, int, int]) -> Cause:
    """What it is that differs in two texts that go on alike behind it.

    :param span: start and end in ``one``, start and end in ``two``.
    """
    begin, end, other_begin, other_end = span
    first, second = one[begin:end], two[other_begin:other_end]
    if first.split() == second.split():
        return Cause.WHITESPACE
    for kind, pattern in _KINDS.items():
        if _covers(pattern, one, begin, end) and _covers(pattern, two, other_begin, other_end):
            return Cause.ID if kind == "uuid" else Cause(kind)
    return Cause.VALUE if max(len(first), len(second)) <= _SHORT else Cause.ORDER


def _covers(pattern: re.Pattern[str], text: str, begin: int, end: int) -> bool:
    """All of a difference, edges of words and blanks aside, is one or two matches."""
    start = max(0, begin - _AROUND)
    window = text[start : end + _AROUND]
    left = [True] * (end - begin)
    for match in pattern.finditer(window):
        for at in range(max(begin, start + match.start()), min(end, start + match.end())):
            left[at - begin] = False
    touched = begin == end and any(
        start + match.start() <= begin <= start + match.end() for match in pattern.finditer(window)
    )
    rest = "".join(char for char, free in zip(text[begin:end], left, strict=True) if free)
    return touched or (begin != end and not all(left) and not re.search(r"\w", rest))


def _sorted_objects(text: str) -> str | None:
    """The text with every JSON object or list in it in canonical form; None: there is none."""
    decoder, pieces, at, found = json.JSONDecoder(), [], 0, False
    while (start := _next_object(text, at)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            pieces.append(text[at : start + 1])
            at = start + 1
            continue
        found = found or bool(value)
        pieces += [text[at:start], canonical(value)]
        at = end
    return "".join([*pieces, text[at:]]) if found else None


def _next_object(text: str, at: int) -> int:
    places = [place for place in (text.find("{", at), text.find("[", at)) if place >= 0]
    return min(places, default=-1)
