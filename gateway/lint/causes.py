"""Why two texts that mean the same are not the same: the kinds of difference. Pure."""

from __future__ import annotations

import re
from collections import Counter

from gateway.lint.findings import Cause
from gateway.lint.forms import whole
from gateway.lint.patterns import KINDS, MARKUP
from gateway.lint.read import Part

_AROUND = 40
"""Characters beside a difference that may belong to the same date or id."""
_SHORT = 160
"""A difference up to so long is a value that was filled in; a longer one is a text of its own."""


Span = tuple[int, int, int, int]


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
    return whole(one.text, two.text)


def of_spans(one: str, two: str, span: Span) -> tuple[Cause, Span]:
    """What it is that differs in two texts that go on alike behind it, and all of that.

    :param span: start and end in ``one``, start and end in ``two``.
    :return: the span is wider where a value differs in part (in the minutes of a time).
    """
    begin, end, other_begin, other_end = span
    first, second = one[begin:end], two[other_begin:other_end]
    if first.split() == second.split():
        return Cause.WHITESPACE, span
    for kind, pattern in KINDS.items():
        value = _covered(pattern, one, begin, end)
        other = _covered(pattern, two, other_begin, other_end)
        if value is not None and other is not None:
            return Cause.ID if kind == "uuid" else Cause(kind), (*value, *other)
    if max(len(first), len(second)) > _SHORT:
        return Cause.ORDER, span
    label = one[end : end + 1] == ":" == two[other_end : other_end + 1]
    return Cause.TEMPLATE if _is_wording(first, second, label=label) else Cause.VALUE, span


def _is_wording(first: str, second: str, *, label: bool) -> bool:
    """Other words around the same text, not a value: something stands in one only, or the two are
    markup, labels of a common word, or equal but for their case."""
    words, others = (set(re.findall(r"\w+", text.lower())) for text in (first, second))
    if not (words and others):
        return True
    markup = MARKUP.search(first) is not None or MARKUP.search(second) is not None
    return markup or first.lower() == second.lower() or (label and bool(words & others))


def _covered(pattern: re.Pattern[str], text: str, begin: int, end: int) -> tuple[int, int] | None:
    """Where the matches begin and end that a difference lies in, edges of words and blanks aside;
    None: there is more in it than matches."""
    start = max(0, begin - _AROUND)
    matches = [
        (start + match.start(), start + match.end())
        for match in pattern.finditer(text[start : end + _AROUND])
    ]
    left = [
        char
        for at, char in enumerate(text[begin:end], begin)
        if not any(first <= at < last for first, last in matches)
    ]
    touching = [value for value in _joined(text, matches) if value[0] <= end and begin <= value[1]]
    if not touching or (begin != end and len(left) == end - begin):
        return None
    if re.search(r"\w", "".join(left)):
        return None
    return min(begin, touching[0][0]), max(end, touching[-1][1])


def _joined(text: str, matches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Matches with nothing but a comma and blanks between them are one value: a day and a time."""
    joined: list[tuple[int, int]] = []
    for first, last in matches:
        near = joined and not text[joined[-1][1] : first].strip(", ")
        joined.append((joined.pop()[0] if near else first, last))
    return joined
