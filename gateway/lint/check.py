"""The check: each prompt against those before it that say most of the same. Pure.

reused   longest beginning that some earlier prompt has, as a prefix cache sees it
wanted   what the most similar earlier prompt shares with it, differences left out
lost     wanted - reused, if that is worth speaking of
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.lint.causes import Cause
from gateway.lint.compare import SHINGLE, Parting, Text, part, text_of
from gateway.lint.findings import REMEDIES, Finding, LintResult
from gateway.lint.read import Prompt

_BLOCK = 16
"""Units per link of the chain that finds equal beginnings."""
_SAMPLE = 8
"""One in so many shingles is remembered."""
_TRIES = 4
"""So many earlier prompts are compared in full."""
_KEPT = 3
"""Prompts remembered per shingle."""
_EXAMPLES = 4
_DAY_S = 86_400.0
_BY_PART = (Cause.TOOL_ORDER, Cause.JSON_KEYS, Cause.SHUFFLED, Cause.WHITESPACE, Cause.ROLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a file is judged."""

    least_tokens: int = 64
    """Less lost than this in a request is not told."""
    prefill_tokens_per_s: float = 10_000.0
    requests_per_day: float | None = None
    chars_per_token: float = 4.0

    def tokens(self, chars: float) -> int:
        """Estimate for a text of so many characters."""
        return int(chars / self.chars_per_token)


@dataclass(slots=True)
class _Group:
    partings: list[Parting] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    lost: int = 0


class _Memory:
    """The prompts so far."""

    def __init__(self) -> None:
        self.texts: list[Text] = []
        self._chain: dict[int, int] = {}
        self._shingles: dict[int, list[int]] = {}

    def reused(self, text: Text) -> int:
        """Characters at the beginning that some earlier prompt has too."""
        links = _links(text)
        known = next((at for at, link in enumerate(links) if link not in self._chain), len(links))
        if not known:
            return 0
        one, at = self.texts[self._chain[links[known - 1]]], known * _BLOCK
        most = min(len(one.units), len(text.units))
        while at < most and one.units[at] == text.units[at]:
            at += 1
        return text.starts[at]

    def similar(self, text: Text) -> list[Text]:
        """The earlier prompts that share most with it, wherever."""
        votes = Counter[int]()
        for shingle in _sampled(text):
            votes.update(self._shingles.get(shingle, ()))
        return [self.texts[number] for number, _ in votes.most_common(_TRIES)]

    def add(self, text: Text) -> None:
        """One more."""
        number = len(self.texts)
        self.texts.append(text)
        for link in _links(text):
            self._chain.setdefault(link, number)
        for shingle in _sampled(text):
            known = self._shingles.setdefault(shingle, [])
            if len(known) == _KEPT:
                known.pop(1)  # the first stays, the newest is added
            known.append(number)


def _links(text: Text) -> list[int]:
    links, link = [], 0
    for at in range(0, len(text.units) - _BLOCK + 1, _BLOCK):
        link = hash((link, text.units[at : at + _BLOCK]))
        links.append(link)
    return links


def _sampled(text: Text) -> set[int]:
    """Hashes of some of its shingles: the same ones wherever they stand."""
    units = text.units
    hashes = {hash(units[at : at + SHINGLE]) for at in range(len(units) - SHINGLE + 1)}
    return {value for value in hashes if not value % _SAMPLE}


def check(prompts: Iterable[Prompt], settings: Settings) -> LintResult:
    """Judge prompts in the order in which they were sent; an empty file is fine."""
    memory = _Memory()
    groups: dict[tuple[str, ...], _Group] = {}
    count = tokens = reused_tokens = 0
    times: list[float] = []
    for prompt in prompts:
        text = text_of(prompt)
        count += 1
        if prompt.at is not None:
            times.append(prompt.at)
        tokens += settings.tokens(len(text.text))
        reused = memory.reused(text)
        reused_tokens += settings.tokens(reused)
        parting = _dearest(text, memory.similar(text))
        lost = 0 if parting is None else parting.prefix + parting.lost - reused
        lost_tokens = settings.tokens(lost)
        if parting is not None and lost_tokens >= settings.least_tokens:
            group = groups.setdefault(_name(prompt, parting), _Group())
            group.partings.append(parting)
            group.lines.append(prompt.line)
            group.lost += lost_tokens
        memory.add(text)
    per_day, source = _per_day(count, times, settings)
    found = [_finding(group, per_day / max(1, count), settings) for group in groups.values()]
    return LintResult(
        prompts=count,
        tokens=tokens,
        requests_per_day=per_day,
        per_day_from=source,
        reused_tokens=reused_tokens,
        lost_tokens=sum(group.lost for group in groups.values()),
        findings=tuple(sorted(found, key=lambda one: -one.lost_tokens)),
    )


def _dearest(text: Text, others: list[Text]) -> Parting | None:
    """The parting from the prompt that shares most with it in all."""
    found = [parting for other in others if (parting := part(other, text)) is not None]
    return max(found, key=lambda one: one.prefix + one.lost, default=None)


def _name(prompt: Prompt, parting: Parting) -> tuple[str, ...]:
    """Partings of one name are one finding."""
    before = "" if parting.cause in _BY_PART else parting.before[-24:]
    return prompt.model, parting.cause, parting.label, before


def _per_day(count: int, times: list[float], settings: Settings) -> tuple[float, str]:
    if settings.requests_per_day is not None:
        return settings.requests_per_day, "given"
    span_s = max(times) - min(times) if times else 0.0
    if len(times) == count and span_s > 60.0:
        return count * _DAY_S / span_s, "times"
    return float(count), "file"


def _finding(group: _Group, times: float, settings: Settings) -> Finding:
    first = group.partings[0]
    values = dict.fromkeys(
        " ".join(text.replace("\0", " ").split())
        for parting in group.partings
        for text in (parting.one, parting.two)
    )
    shared = sum(parting.prefix for parting in group.partings) / len(group.partings)
    per_day = group.lost * times
    return Finding(
        cause=first.cause,
        part=first.label,
        after_tokens=settings.tokens(shared),
        before=first.before,
        examples=tuple(value for value in values if value)[:_EXAMPLES],
        lines=tuple(group.lines[:_EXAMPLES]),
        requests=len(group.partings),
        lost_tokens=group.lost,
        tokens_per_day=round(per_day),
        seconds_per_day=per_day / settings.prefill_tokens_per_s,
        remedy=REMEDIES[first.cause],
    )
