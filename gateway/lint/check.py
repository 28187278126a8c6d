"""The check: each prompt against those before it that say most of the same. Pure.

reused   longest beginning that some earlier prompt has, as a prefix cache sees it
wanted   what the most similar earlier prompt shares with it, differences left out
lost     wanted - reused, if that is worth speaking of
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.lint.compare import MOST_OF_IT, SHINGLE, Parting, Text, part, text_of
from gateway.lint.findings import REMEDIES, Cause, Finding, LintResult
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
_FEW = 8
"""In a file of fewer prompts what happens once may be a habit."""
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
    tokens: list[int] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Tokens, of all its prompts."""
        return sum(self.tokens)

    def add(self, parting: Parting, line: int, tokens: int) -> None:
        """One more prompt."""
        self.partings.append(parting)
        self.lines.append(line)
        self.tokens.append(tokens)

    def usual(self) -> _Group:
        """Without what may be chance: two prompts that hold the same document behind others, and no
        third, would gain nothing by another order; nor do words that differ once matter if little
        is shared behind them."""
        times = Counter(parting.mark for parting in self.partings)
        kept = _Group()
        for parting, line, tokens in zip(self.partings, self.lines, self.tokens, strict=True):
            sure = parting.share >= MOST_OF_IT or len(self.partings) > 1
            again = times[parting.mark] > 1
            if {Cause.ORDER: again, Cause.VALUE: sure, Cause.TEMPLATE: sure}.get(
                parting.cause, True
            ):
                kept.add(parting, line, tokens)
        return kept


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

    def similar(self, sample: set[int]) -> list[Text]:
        """The earlier prompts that share most with one, wherever; ``sample`` of its shingles."""
        votes = Counter[int]()
        for shingle in sample:
            votes.update(self._shingles.get(shingle, ()))
        return [self.texts[number] for number, _ in votes.most_common(_TRIES)]

    def add(self, text: Text, sample: set[int]) -> None:
        """One more."""
        number = len(self.texts)
        self.texts.append(text)
        for link in _links(text):
            self._chain.setdefault(link, number)
        for shingle in sample:
            known = self._shingles.setdefault(shingle, [])
            if len(known) == _KEPT:
                known.pop(1)  # the first stays, the newest is added
            known.append(number)


def _links(text: Text) -> list[int]:
    links, link = [], 0
    for at in range(0, len(text.units) - _BLOCK + 1, _BLOCK):
        link = hash((link, text.marks[at : at + _BLOCK]))
        links.append(link)
    return links


def _sampled(text: Text) -> set[int]:
    """Hashes of some of its shingles: the same ones wherever they stand."""
    marks = text.marks
    hashes = {hash(marks[at : at + SHINGLE]) for at in range(len(marks) - SHINGLE + 1)}
    return {value for value in hashes if not value % _SAMPLE}


def check(prompts: Iterable[Prompt], settings: Settings) -> LintResult:
    """Judge prompts in the order in which they were sent; an empty file is fine."""
    memory = _Memory()
    groups: dict[tuple[str, ...], _Group] = {}
    count = asked = tokens = reused_tokens = 0
    times: list[float] = []
    for prompt in prompts:
        text = text_of(prompt)
        count += 1
        asked += prompt.stands_for
        if prompt.at is not None:
            times.append(prompt.at)
        tokens += settings.tokens(len(text.text))
        reused = memory.reused(text)
        reused_tokens += settings.tokens(reused)
        sample = _sampled(text)
        parting = _dearest(text, memory.similar(sample))
        lost = 0 if parting is None else parting.prefix + parting.lost - reused
        lost_tokens = settings.tokens(lost)
        if parting is not None and lost_tokens >= settings.least_tokens:
            group = groups.setdefault(_name(prompt, parting), _Group())
            group.add(parting, prompt.line, lost_tokens)
        memory.add(text, sample)
    per_day, source = _per_day(asked, times if len(times) == count else [], settings)
    habits = [group if count < _FEW else group.usual() for group in groups.values()]
    habits = [group for group in habits if group.partings]
    found = [_finding(group, per_day / count, settings) for group in habits]
    return LintResult(
        prompts=count,
        tokens=tokens,
        requests_per_day=per_day,
        per_day_from=source,
        reused_tokens=reused_tokens,
        lost_tokens=sum(group.lost for group in habits),
        findings=tuple(sorted(found, key=lambda one: -one.lost_tokens)),
    )


def _dearest(text: Text, others: list[Text]) -> Parting | None:
    """The parting from the prompt that shares most with it in all."""
    found = [parting for other in others if (parting := part(other, text)) is not None]
    return max(found, key=lambda one: one.prefix + one.lost, default=None)


def _name(prompt: Prompt, parting: Parting) -> tuple[str, ...]:
    """Partings of one name are one finding."""
    everywhere = (*_BY_PART, Cause.ORDER)
    before = "" if parting.cause in everywhere else parting.before[-24:]
    return prompt.model, parting.cause, parting.label, before


def _per_day(asked: int, times: list[float], settings: Settings) -> tuple[float, str]:
    """Of ``asked`` requests at ``times``; empty: not all of the times are known."""
    if settings.requests_per_day is not None:
        return settings.requests_per_day, "given"
    span_s = max(times) - min(times) if times else 0.0
    if span_s > 60.0:
        return asked * _DAY_S / span_s, "times"
    return float(asked), "file"


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
