"""Two prompts beside each other: where they part, and what they share behind that place. Pure.

A prefix cache keeps what two prompts share from the beginning. What they share further on is
computed again, and would not have been had the difference come later: that is what is counted.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from zlib import crc32

from gateway.lint.causes import of_parts, of_spans
from gateway.lint.findings import Cause
from gateway.lint.forms import begun
from gateway.lint.read import Part, Prompt

_SIGNS = "\u3040-\u30ff\u3400-\u9fff"
"""Of scripts that put no blanks between words: each is a unit."""
_UNIT = re.compile(rf"\s+|[{_SIGNS}]|[^\W{_SIGNS}]+|[^\w\s]")
SHINGLE = 24
"""Units (words, blanks, signs) in a row that two texts do not share by chance."""
_SHOWN = 80
"""Characters of a difference that are kept."""
MOST_OF_IT = 0.5
"""Texts of their own, and differences that come once, count only if at least so much of what
follows them is shared."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as one text and as units."""

    text: str
    units: tuple[str, ...]
    marks: tuple[int, ...]
    """A hash of each unit, the same in every process: equal files have equal findings."""
    starts: tuple[int, ...]
    """Where each unit begins in ``text``, and the end."""
    parts: tuple[Part, ...]
    edges: tuple[int, ...]
    """Units before each part, and the number of all."""


def text_of(prompt: Prompt) -> Text:
    """Take a prompt apart. Each part begins with a unit that names it."""
    units: list[str] = []
    edges = []
    for part in prompt.parts:
        edges.append(len(units))
        units.append(f"\0{part.label}\0")
        units += _UNIT.findall(part.text)
    starts = (0, *accumulate(len(unit) for unit in units))
    marks = tuple(crc32(unit.encode("utf-8", "surrogatepass")) for unit in units)
    edges.append(len(units))
    return Text("".join(units), tuple(units), marks, starts, prompt.parts, tuple(edges))


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two prompts part although they go on alike."""

    cause: Cause
    label: str
    """Part in which it happens."""
    prefix: int
    """Characters that they share from the beginning."""
    lost: int
    """Characters that they share behind the difference."""
    before: str
    """Text just before the difference."""
    one: str
    two: str
    """The difference in both."""
    share: float = 1.0
    """The part of what follows the difference that is shared."""
    mark: int = 0
    """Of :attr:`Cause.ORDER`: of the text that is shared, equal for texts that differ at their
    edges only."""


def part(one: Text, two: Text) -> Parting | None:
    """How ``two`` differs from ``one``; None: one begins with the other, or nothing is shared
    behind the difference."""
    at = _common(one.units, two.units, 0, 0)
    if at >= min(len(one.units), len(two.units)):
        return None
    where = max(place for place, edge in enumerate(one.edges[:-1]) if edge <= at)
    if one.edges[: where + 1] == two.edges[: where + 1] and where < len(two.parts):
        if one.parts[where].label != two.parts[where].label:
            return _relabelled(one, two, at, where)
        cause = of_parts(one.parts[where], two.parts[where])
        if cause is not None:
            ends = one.edges[where + 1], two.edges[where + 1]
            return _reformed(one, two, at, where, cause, ends)
        start = one.starts[one.edges[where] + 1]
        found = begun(one.parts[where].text, two.parts[where].text, one.starts[at] - start)
        if found is not None:
            cause, *stretch = found
            ends = _unit_at(one, start + stretch[0]), _unit_at(two, start + stretch[1])
            return _reformed(one, two, at, where, cause, ends)
    return _varied(one, two, at, one.parts[where].label)


def _common(one: tuple[str, ...], two: tuple[str, ...], i: int, j: int) -> int:
    """How many units are equal from two places on."""
    length = min(len(one) - i, len(two) - j)
    if one[i : i + length] == two[j : j + length]:
        return length
    return next(n for n in range(length) if one[i + n] != two[j + n])


def _unit_at(text: Text, place: int) -> int:
    """The unit that begins at a character, or the next one."""
    return bisect_left(text.starts, place)


def _relabelled(one: Text, two: Text, at: int, where: int) -> Parting | None:
    """The same text, or the beginning of one, by different roles."""
    first, second = one.parts[where], two.parts[where]
    begin, other = one.edges[where] + 1, two.edges[where] + 1
    same = _common(one.units, two.units, begin, other)
    if same < SHINGLE and first.text != second.text:
        return None
    lost = _behind(one, two, begin, other)
    place = two.starts[at]
    before = _before(two, place)
    return Parting(Cause.ROLE, second.label, place, lost, before, first.label, second.label)


def _reformed(
    one: Text, two: Text, at: int, where: int, cause: Cause, ends: tuple[int, int]
) -> Parting:
    """A stretch in another form: what is left of it was lost, and what is equal behind it.

    :param ends: the units behind it in both.
    """
    end, other_end = ends
    place = two.starts[at]
    lost = two.starts[other_end] - place + _behind(one, two, end, other_end)
    first = one.text[one.starts[at] : one.starts[end]][:_SHOWN]
    second = two.text[place : two.starts[other_end]][:_SHOWN]
    label = two.parts[where].label
    return Parting(cause, label, place, lost, _before(two, place), first, second)


def _varied(one: Text, two: Text, at: int, label: str) -> Parting | None:
    """Different words, then the same again."""
    runs = _runs(one, two, at, at)
    if not runs:
        return None
    i, j, _ = runs[0]
    span = (one.starts[at], one.starts[i], two.starts[at], two.starts[j])
    cause, span = of_spans(one.text, two.text, span)
    lost = sum(two.starts[j + length] - two.starts[j] for _, j, length in runs)
    share = lost / (two.starts[-1] - two.starts[j])
    if cause is Cause.ORDER and share < MOST_OF_IT:
        return None
    first, second = one.text[span[0] : span[1]][:_SHOWN], two.text[span[2] : span[3]][:_SHOWN]
    mark = _mark(two.marks, runs) if cause is Cause.ORDER else 0
    before = _before(two, span[2])
    return Parting(cause, label, two.starts[at], lost, before, first, second, share, mark)


def _mark(marks: tuple[int, ...], runs: list[tuple[int, int, int]]) -> int:
    """Least of the hashes of all shingles in the longest run."""
    _, begin, length = max(runs, key=lambda run: run[2])
    places = range(begin, begin + length - SHINGLE + 1)
    return min(hash(marks[at : at + SHINGLE]) for at in places)


def _before(text: Text, place: int) -> str:
    """A little of what stands before a character, within its part."""
    return text.text[max(text.text.rfind("\0", 0, place) + 1, place - _SHOWN // 2) : place]


def _behind(one: Text, two: Text, i: int, j: int) -> int:
    """Characters shared from two places on."""
    same = _common(one.units, two.units, i, j)
    runs = [(i, j, same), *_runs(one, two, i + same, j + same)]
    return sum(two.starts[j + length] - two.starts[j] for _, j, length in runs)


def _runs(one: Text, two: Text, i: int, j: int) -> list[tuple[int, int, int]]:
    """Longest equal runs of both from two places on, in order: (place, place, units)."""
    places: dict[tuple[str, ...], int] = {}
    for at in range(len(one.units) - SHINGLE, i - 1, -1):
        places[one.units[at : at + SHINGLE]] = at
    runs = []
    while j + SHINGLE <= len(two.units):
        at = places.get(two.units[j : j + SHINGLE], -1)
        if at < i:
            j += 1
            continue
        length = _common(one.units, two.units, at, j)
        runs.append((at, j, length))
        i, j = at + length, j + length
    return runs
