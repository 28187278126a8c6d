"""Texts that say the same in another form: blanks, JSON written otherwise, lines in another order.

Pure. :func:`whole` compares two texts; :func:`begun` finds such a stretch where two texts part,
whatever follows it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from gateway.lint.findings import Cause
from gateway.lint.read import canonical

_BRACKET = re.compile(r"[\[{]")
_MOST_LINES = 400
"""So far two texts are searched for the end of shuffled lines."""


def _as_written(value: Any) -> str:
    """JSON that is equal for equal values whose keys stand in the same order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _unordered(value: Any) -> str:
    """JSON that is equal for values that differ in the order of keys and of list items only."""
    return canonical(_sorted_lists(value))


def _sorted_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_lists(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted((_sorted_lists(item) for item in value), key=canonical)
    return value


_FORMS = (
    (_as_written, Cause.WHITESPACE),
    (canonical, Cause.JSON_KEYS),
    (_unordered, Cause.SHUFFLED),
)
"""From the nearest to the farthest: the first in which two values are equal says what differs."""


def whole(one: str, two: str) -> Cause | None:
    """Two different texts as a whole; None: they say different things."""
    if one.split() == two.split():
        return Cause.WHITESPACE
    first, second = _values(one), _values(two)
    if first and second:
        for form, cause in _FORMS:
            if _rewritten(one, first, form) == _rewritten(two, second, form):
                return cause
    lines = [[line for line, _ in _lines(text, 0)] for text in (one, two)]
    return Cause.SHUFFLED if _permuted(*lines) else None


def begun(one: str, two: str, at: int) -> tuple[Cause, int, int] | None:
    """A stretch in another form in which two texts part at ``at``, and where it ends in each.

    What follows may differ. None: there is no such stretch.
    """
    first, second = _around(one, at), _around(two, at)
    if first is not None and second is not None:
        for form, cause in _FORMS:
            if form(first[2]) == form(second[2]):
                return cause, first[1], second[1]
    return _shuffled_from(one, two, at)


def _permuted(one: list[str], two: list[str]) -> bool:
    return len(one) > 2 and one != two and Counter(one) == Counter(two)


def _shuffled_from(one: str, two: str, at: int) -> tuple[Cause, int, int] | None:
    """The fewest lines, from the one that differs on, that are the same in another order."""
    start = one.rfind("\n", 0, at) + 1
    odd = Counter[str]()
    pairs = zip(_lines(one, start), _lines(two, start), strict=False)
    for count, ((first, end), (second, other_end)) in enumerate(pairs, 1):
        for line, by in ((first, 1), (second, -1)):
            odd[line] += by
            if not odd[line]:
                del odd[line]
        if not odd:
            return (Cause.SHUFFLED, end, other_end) if count > 1 else None
        if count == _MOST_LINES:
            return None
    return None


def _lines(text: str, start: int) -> Iterator[tuple[str, int]]:
    """Lines that are not blank, stripped, each with where it ends."""
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        if line := text[start:end].strip():
            yield line, end
        start = end + 1


def _around(text: str, at: int) -> tuple[int, int, Any] | None:
    """The JSON value of a text in which a place lies."""
    return next((value for value in _values(text) if value[0] <= at < value[1]), None)


@lru_cache(maxsize=64)
def _values(text: str) -> tuple[tuple[int, int, Any], ...]:
    """JSON objects and lists in a text that hold something: start, end, value."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while bracket := _BRACKET.search(text, at):
        try:
            value, at = decoder.raw_decode(text, bracket.start())
        except (ValueError, RecursionError):
            at = bracket.end()
            continue
        if value:
            found.append((bracket.start(), at, value))
    return tuple(found)


def _rewritten(
    text: str, values: tuple[tuple[int, int, Any], ...], form: Callable[[Any], str]
) -> str:
    """The text with its JSON in a form of its own."""
    pieces, at = [], 0
    for start, end, value in values:
        pieces += [text[at:start], form(value)]
        at = end
    return "".join([*pieces, text[at:]])
