"""What makes prompts miss the cache, planted in made-up applications: see ``lintset.py``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain

from lintprose import NAMES, Case, chat, hexes, prose, question, reordered, tools


def _moments(rng: random.Random, count: int, spread: timedelta) -> list[datetime]:
    start = datetime(2025, 3, 3, 7, 15, 9, tzinfo=UTC)
    return [start + spread * rng.random() for _ in range(count)]


_HOURS, _DAYS = timedelta(hours=9), timedelta(days=40)
_GERMAN = "Jan. Feb. März April Mai Juni Juli Aug. Sept. Okt. Nov. Dez.".split()
_DATES: dict[str, tuple[str, timedelta, Callable[[datetime], str]]] = {
    "iso day": ("Today is {}.", _DAYS, lambda t: t.strftime("%Y-%m-%d")),
    "iso instant": ("Current time: {}", _HOURS, lambda t: t.strftime("%Y-%m-%dT%H:%M:%S.123Z")),
    "month in words": ("Today's date is {}.", _DAYS, lambda t: t.strftime("%B %-d, %Y")),
    "weekday": ("It is {} now.", _DAYS, lambda t: t.strftime("%A, %-d %B")),
    "ctime": ("[{}]", _HOURS, lambda t: t.strftime("%a %b %e %H:%M:%S %Y")),
    "slashes": ("Date: {}", _DAYS, lambda t: t.strftime("%m/%d/%Y")),
    "dots": ("Stand: {}.", _DAYS, lambda t: t.strftime("%d.%m.%Y")),
    "german": ("Heute ist der {}.", _DAYS, lambda t: f"{t.day}. {_GERMAN[t.month - 1]} {t.year}"),
    "japanese": ("今日は{}です。", _DAYS, lambda t: f"{t.year}年{t.month}月{t.day}日"),
    "epoch": ("now={}", _HOURS, lambda t: str(int(t.timestamp()))),
    "clock": ("The local time is {}.", _HOURS, lambda t: t.strftime("%I:%M %p")),
    "day with clock": ("Session opened {} UTC.", _HOURS, lambda t: t.strftime("%Y/%m/%d %H:%M")),
}  # fmt: skip


def _date_cases(rng: random.Random) -> Iterator[Case]:
    for name, (sentence, spread, write) in _DATES.items():
        rules = prose(rng, 30)
        opening = f"You are the assistant of {rng.choice(NAMES)} & Sons."
        stamps = [sentence.format(write(moment)) for moment in _moments(rng, 24, spread)]
        bodies = [chat(f"{opening} {stamp}\n{rules}", question(rng)) for stamp in stamps]
        yield Case(f"date: {name}", tuple(bodies), frozenset({"date"}))


def _uuid(rng: random.Random) -> str:
    return "-".join(hexes(rng, length) for length in (8, 4, 4, 4, 12))


def _crockford(rng: random.Random) -> str:
    return "01J" + "".join(rng.choice("0123456789ABCDEFGHJKMNPQRSTVWXYZ") for _ in range(23))


_IDS: dict[str, Callable[[random.Random], str]] = {
    "uuid": lambda rng: f"Conversation {_uuid(rng)}.",
    "user number": lambda rng: f"user_id: {rng.randrange(10**5, 10**6)}",
    "prefixed": lambda rng: f"Customer cus_{hexes(rng, 14)} is writing.",
    "hex": lambda rng: f"trace {hexes(rng, 32)}",
    "ulid": lambda rng: f"<session>{_crockford(rng)}</session>",
    "account": lambda rng: f"Account #{rng.randrange(1000, 9999)}-{rng.randrange(1000, 9999)}:",
    "mail": lambda rng: f"You speak with {rng.choice(NAMES).lower()}.{hexes(rng, 3)}@example.com.",
    "snake": lambda rng: (
        f"User: {rng.choice(NAMES).lower()}_{rng.choice(NAMES).lower()}_{rng.randrange(1000, 9999)}"
    ),
}


def _id_cases(rng: random.Random) -> Iterator[Case]:
    for name, write in _IDS.items():
        rules = prose(rng, 30)
        bodies = [
            chat(f"{write(rng)}\nYou answer for the shop.\n{rules}", question(rng))
            for _ in range(20)
        ]
        yield Case(f"id: {name}", tuple(bodies), frozenset({"id"}))
    manual = prose(rng, 40)
    bodies = [
        chat("Be brief.", f"[{_uuid(rng)}] Manual:\n{manual}\n\n{question(rng)}") for _ in range(20)
    ]
    yield Case("id: before a manual in the user's message", tuple(bodies), frozenset({"id"}))
    rules = prose(rng, 30)
    users = [rng.randrange(10**7, 10**8) for _ in range(5)]
    bodies = [
        chat(f"Tenant {rng.choice(users)}. Follow the rules.\n{rules}", question(rng))
        for _ in range(30)
    ]
    yield Case("id: five tenants, each often", tuple(bodies), frozenset({"id"}))


def _tool_cases(rng: random.Random) -> Iterator[Case]:
    for count in (4, 9, 14):
        system, offered = prose(rng, 12), tools(rng, count)
        bodies = [chat(system, question(rng), tools=rng.sample(offered, count)) for _ in range(20)]
        yield Case(f"tools: {count} in any order", tuple(bodies), frozenset({"tool_order"}))
    system, offered = prose(rng, 12), tools(rng, 8)
    swapped = [*offered[:6], offered[7], offered[6]]
    bodies = [
        chat(system, question(rng), tools=offered if number % 2 else swapped)
        for number in range(20)
    ]
    yield Case("tools: the last two change places", tuple(bodies), frozenset({"tool_order"}))
    yield _tools_as_text(rng)


def _tools_as_text(rng: random.Random) -> Case:
    lines = [
        f"- {tool['function']['name']}: {tool['function']['description']}"
        for tool in tools(rng, 10)
    ]
    rules = prose(rng, 15)
    bodies = []
    for _ in range(20):
        offered = "\n".join(rng.sample(lines, len(lines)))
        bodies.append(chat(f"You can use these tools:\n{offered}\n\n{rules}", question(rng)))
    return Case("tools: a shuffled list in the text", tuple(bodies), frozenset({"tool_order"}))


def _key_cases(rng: random.Random) -> Iterator[Case]:
    system, offered = prose(rng, 12), tools(rng, 6)
    bodies = [chat(system, question(rng), tools=reordered(rng, offered)) for _ in range(20)]
    yield Case("keys: of the tools", tuple(bodies), frozenset({"json_keys"}))
    profile = {
        "plan": "gold",
        "region": "eu",
        "limits": {"refund": 50, "calls": 9},
        "flags": ["a", "b"],
        "lang": "en",
    }
    for indent in (None, 2):
        rules = prose(rng, 25)
        bodies = []
        for _ in range(20):
            text = json.dumps(reordered(rng, profile), indent=indent)
            bodies.append(chat(f"Settings: {text}\n\n{rules}", question(rng)))
        yield Case(
            f"keys: of settings in the system prompt, indent {indent}",
            tuple(bodies),
            frozenset({"json_keys"}),
        )
    catalogue = {
        f"item{number}": {"name": prose(rng, 1), "price": number, "stock": 3} for number in range(8)
    }
    bodies = [
        chat(
            "Answer from the catalogue.",
            f"{json.dumps(reordered(rng, catalogue))}\n\n{question(rng)}",
        )
        for _ in range(20)
    ]
    yield Case(
        "keys: of a catalogue in the user's message", tuple(bodies), frozenset({"json_keys"})
    )


_SPACES: dict[str, Callable[[str], str]] = {
    "line ends": lambda text: text.replace("\n", "\r\n"),
    "trailing": lambda text: text.replace("\n", " \n"),
    "empty lines": lambda text: text.replace("\n", "\n\n"),
    "leading": lambda text: "\n" + text,
    "tabs": lambda text: text.replace("\n- ", "\n\t- "),
    "double": lambda text: text.replace(". ", ".  "),
    "no-break": lambda text: text.replace(". ", ".\u00a0"),
    "indented": lambda text: text.replace("\n", "\n    "),
}


def _space_cases(rng: random.Random) -> Iterator[Case]:
    for name, change in _SPACES.items():
        rules = "You help people with orders. Be polite.\n" + prose(rng, 30)
        other = change(rules)
        bodies = [chat(rules if number % 2 else other, question(rng)) for number in range(20)]
        yield Case(f"space: {name}", tuple(bodies), frozenset({"whitespace"}))
    offered, rules = tools(rng, 6), prose(rng, 15)
    bodies = []
    for number in range(20):
        text = json.dumps(offered, indent=2 if number % 2 else None)
        bodies.append(chat(f"Tools:\n{text}\n{rules}", question(rng)))
    yield Case("space: JSON with and without indent", tuple(bodies), frozenset({"whitespace"}))


def _template_cases(rng: random.Random) -> Iterator[Case]:
    forms: dict[str, tuple[Callable[[str], str], Callable[[str], str]]] = {
        "headings": (
            lambda text: f"### Instructions\n{text}",
            lambda text: f"<instructions>\n{text}\n</instructions>",
        ),
        "preamble": (lambda text: text, lambda text: f"You are a helpful assistant.\n\n{text}"),
        "markup": (
            lambda text: f"[INST] {text} [/INST]",
            lambda text: f"<|im_start|>system\n{text}<|im_end|>",
        ),
        "label": (lambda text: f"System: {text}", lambda text: f"SYSTEM PROMPT: {text}"),
    }
    for name, (one, other) in forms.items():
        rules = prose(rng, 30)
        bodies = [
            chat((one if number % 2 else other)(rules), question(rng)) for number in range(20)
        ]
        yield Case(f"template: {name}", tuple(bodies), frozenset({"template"}))
    rules = prose(rng, 30)
    bodies = [chat(rules, question(rng)) for _ in range(20)]
    for body in bodies[::2]:
        body["messages"][0]["role"] = "developer"
    yield Case("template: role of the rules", tuple(bodies), frozenset({"template"}))
    rules = prose(rng, 30)
    bodies = [chat(rules, question(rng)) for _ in range(20)]
    for body in bodies[::2]:
        body["messages"] = [
            {"role": "user", "content": f"{rules}\n\n{body['messages'][1]['content']}"}
        ]
    yield Case("template: rules in the user's message", tuple(bodies), frozenset({"template"}))


def _content_cases(rng: random.Random) -> Iterator[Case]:
    rules = prose(rng, 30)
    bodies = [
        chat("You classify.", f"Text: {question(rng)} {prose(rng, 2)}\n\nRules:\n{rules}")
        for _ in range(20)
    ]
    yield Case("content: the text before the rules", tuple(bodies), frozenset({"content"}))
    rules = prose(rng, 30)
    bodies = [
        chat(f"You help {rng.choice(NAMES)}, who likes {prose(rng, 1)}\n{rules}", question(rng))
        for _ in range(20)
    ]
    yield Case("content: the person before the rules", tuple(bodies), frozenset({"content"}))
    offered = tools(rng, 6)
    bodies = [chat(prose(rng, 2), question(rng), tools=offered) for _ in range(20)]
    yield Case(
        "content: other instructions before the same tools", tuple(bodies), frozenset({"content"})
    )


def planted_cases(rng: random.Random) -> Iterator[Case]:
    """All of them."""
    kinds = (
        *(_date_cases, _id_cases, _tool_cases, _key_cases, _space_cases, _template_cases),
        _content_cases,
    )
    return chain.from_iterable(make(rng) for make in kinds)
