"""Sets of requests with a planted fault each, and clean ones, for ``headwater lint``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID

Request = dict[str, Any]
WORDS = (
    "order account ticket refund policy customer agent request service plan ship delay window "
    "storage region device sensor report invoice credit answer review change update cancel confirm "
    "always never before after unless within every each other please explain describe list check"
).split()
BREAKS = ("\n\n", "\r\n\r\n", "\n \n", "\n\n\n", " \n\n")
NAMES = "Ada Grace Alan Edsger Barbara Donald Margaret Ken Dennis Radia Leslie Frances".split()


def prose(rng: Random, words: int) -> str:
    """Sentences of lower-case words."""
    out = []
    while words > 0:
        length = rng.randrange(6, 14)
        out.append(" ".join(rng.choice(WORDS) for _ in range(length)).capitalize() + ".")
        words -= length
    return " ".join(out)


def tools(rng: Random, count: int) -> list[dict[str, Any]]:
    """Functions with parameters."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"{rng.choice(WORDS)}_{rng.choice(WORDS)}_{n}",
                "description": prose(rng, 25),
                "parameters": {
                    "type": "object",
                    "properties": {
                        rng.choice(WORDS): {"type": "string", "description": prose(rng, 8)},
                        "limit": {"type": "integer"},
                    },
                    "required": ["limit"],
                },
            },
        }
        for n in range(count)
    ]


def chat(system: str, user: str, **more: Any) -> Request:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        **more,
    }


def shuffled(rng: Random, values: list[Any]) -> list[Any]:
    copy = list(values)
    rng.shuffle(copy)
    return copy


def reordered(rng: Random, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(rng, value[key]) for key in shuffled(rng, list(value))}
    return [reordered(rng, one) for one in value] if isinstance(value, list) else value


def _dates(rng: Random, form: Callable[[datetime], str]) -> Iterator[Request]:
    rules, now = prose(rng, 220), datetime(2026, 3, 1, 8)
    for _ in range(20):
        now += timedelta(days=rng.randrange(1, 40), seconds=rng.randrange(86_000))
        yield chat(f"You help customers. Now: {form(now)}\n\n{rules}", prose(rng, 20))


def _ids(rng: Random, make: Callable[[Random], str], where: str) -> Iterator[Request]:
    rules = prose(rng, 220)
    for _ in range(20):
        yield chat(where.format(id=make(rng), rules=rules), prose(rng, 20))


def _documents(rng: Random) -> Iterator[Request]:
    rules, docs = prose(rng, 40), [f"- {prose(rng, 40)}" for _ in range(8)]
    for _ in range(12):
        yield chat("\n".join([rules, *shuffled(rng, docs)]), prose(rng, 20))


def _question_first(rng: Random) -> Iterator[Request]:
    document = prose(rng, 600)
    for _ in range(12):
        question = prose(rng, 60)
        yield chat("You answer from a text.", f"Question: {question}\n\nText:\n{document}")


def _tool_order(rng: Random) -> Iterator[Request]:
    rules, functions = prose(rng, 60), tools(rng, 8)
    for _ in range(12):
        yield chat(rules, prose(rng, 20), tools=shuffled(rng, functions))


def _tool_keys(rng: Random) -> Iterator[Request]:
    rules, functions = prose(rng, 60), tools(rng, 8)
    for _ in range(12):
        yield chat(rules, prose(rng, 20), tools=reordered(rng, functions))


def _context_keys(rng: Random) -> Iterator[Request]:
    rules = prose(rng, 60)
    context = {word: {"text": prose(rng, 20), "rank": n} for n, word in enumerate(WORDS[:12])}
    for _ in range(12):
        shown = json.dumps(reordered(rng, context))
        yield chat(f"{rules}\nContext: {shown}\nUse it well.", prose(rng, 20))


def _blanks(rng: Random) -> Iterator[Request]:
    paragraphs = [prose(rng, 60) for _ in range(5)]
    for _ in range(12):
        rules = "".join(f"{one}{rng.choice(BREAKS)}" for one in paragraphs)
        yield chat(rules, prose(rng, 20))


def _roles(rng: Random) -> Iterator[Request]:
    rules = prose(rng, 240)
    for n in range(12):
        request = chat(rules, prose(rng, 20))
        request["messages"][0]["role"] = ("system", "developer")[n % 2]
        yield request


PLANTED: dict[str, tuple[str, Callable[[Random], Iterator[Request]]]] = {
    "iso time": ("date", lambda r: _dates(r, lambda t: t.isoformat())),
    "iso day": ("date", lambda r: _dates(r, lambda t: t.strftime("%Y-%m-%d"))),
    "american day": ("date", lambda r: _dates(r, lambda t: t.strftime("%B %d, %Y"))),
    "european day": ("date", lambda r: _dates(r, lambda t: t.strftime("%d %b %Y"))),
    "weekday": ("date", lambda r: _dates(r, lambda t: t.strftime("%A, %d/%m/%y"))),
    "clock": ("date", lambda r: _dates(r, lambda t: t.strftime("%I:%M %p"))),
    "epoch": ("date", lambda r: _dates(r, lambda t: str(int(t.timestamp())))),
    "uuid first": (
        "id",
        lambda r: _ids(r, lambda g: str(UUID(int=g.getrandbits(128))), "Session {id}. {rules}"),
    ),
    "user id": (
        "id",
        lambda r: _ids(r, lambda g: f"user_{g.randrange(10**6):06}", "[{id}]\n{rules}"),
    ),
    "mail": (
        "id",
        lambda r: _ids(
            r, lambda g: f"{g.choice(NAMES).lower()}{g.randrange(999)}@x.org", "For {id}: {rules}"
        ),
    ),
    "trace id": ("id", lambda r: _ids(r, lambda g: f"{g.getrandbits(64):016x}", "t={id}\n{rules}")),
    "counter": (
        "number",
        lambda r: _ids(r, lambda g: str(g.randrange(1, 999)), "Request {id} of today.\n{rules}"),
    ),
    "name": (
        "value",
        lambda r: _ids(r, lambda g: g.choice(NAMES), "You are talking to {id}. {rules}"),
    ),
    "tools in any order": ("tool_order", _tool_order),
    "keys of tools": ("json_key_order", _tool_keys),
    "keys of a context": ("json_key_order", _context_keys),
    "documents in any order": ("shuffled_lines", _documents),
    "question before text": ("order", _question_first),
    "blanks and line ends": ("whitespace", _blanks),
    "system or developer": ("role", _roles),
}


def _same_rules(rng: Random) -> Iterator[Request]:
    rules, functions = prose(rng, 200), tools(rng, 4)
    for _ in range(20):
        yield chat(rules, prose(rng, 40), tools=functions)


def _date_at_the_end(rng: Random) -> Iterator[Request]:
    rules, now = prose(rng, 200), datetime(2026, 3, 1)
    for n in range(20):
        now += timedelta(days=n)
        yield chat(rules, f"{prose(rng, 30)}\n\n(It is {now:%Y-%m-%d}.)")


def _fixed_date(rng: Random) -> Iterator[Request]:
    rules = "The current time is 2024-05-15 15:00:00 EST. " + prose(rng, 200)
    for n in range(20):
        yield chat(rules, f"I am user_{n:05}. {prose(rng, 30)}")


def _other_applications(rng: Random) -> Iterator[Request]:
    for _ in range(20):
        yield chat(prose(rng, 200), prose(rng, 30))


def _growing_chats(rng: Random) -> Iterator[Request]:
    rules = prose(rng, 120)
    for _ in range(4):
        request = chat(rules, prose(rng, 30))
        for _ in range(5):
            yield json.loads(json.dumps(request))
            request["messages"].append({"role": "assistant", "content": prose(rng, 40)})
            request["messages"].append({"role": "user", "content": prose(rng, 30)})


def _plain_prompts(rng: Random) -> Iterator[Request]:
    shots = "\n".join(f"Q: {prose(rng, 10)}\nA: {prose(rng, 10)}" for _ in range(10))
    for _ in range(20):
        yield {"model": "m", "prompt": f"{shots}\nQ: {prose(rng, 12)}\nA:"}


def _short_differences(rng: Random) -> Iterator[Request]:
    for n in range(20):
        yield chat(f"It is {n} o'clock. Be kind and brief.", prose(rng, 50))


def _two_tool_sets(rng: Random) -> Iterator[Request]:
    rules, sets = prose(rng, 100), [tools(rng, 5), tools(rng, 5)]
    for n in range(16):
        yield chat(rules, prose(rng, 30), tools=sets[n % 2])


CLEAN: dict[str, Callable[[Random], Iterator[Request]]] = {
    "same rules and tools": _same_rules,
    "date at the end": _date_at_the_end,
    "a date that never changes": _fixed_date,
    "other applications": _other_applications,
    "growing chats": _growing_chats,
    "few shots": _plain_prompts,
    "too short to matter": _short_differences,
    "two sets of tools": _two_tool_sets,
}
