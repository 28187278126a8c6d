"""Planted and clean prompts for ``headwater lint``, written from its description alone.

Nothing here knows how the detector works: each case is what an application might send, with the
causes that a reader of the prompts would name. ``tests/gateway/test_lint_set.py`` states precision
and recall over all of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from lintplanted import planted_cases
from lintprose import Body, Case, chat, hexes, prose, question, reordered, tools


def _mixed_cases(rng: random.Random, planted: list[Case], clean: list[Case]) -> Iterator[Case]:
    for number in range(10):
        chosen = [rng.choice(planted), rng.choice(clean), rng.choice(clean)]
        bodies = [body for case in chosen for body in case.bodies]
        rng.shuffle(bodies)
        name = " + ".join(case.name for case in chosen)
        yield Case(f"mixed {number}: {name}", tuple(bodies), chosen[0].causes)
    rules, offered = prose(rng, 20), tools(rng, 7)
    bodies = [
        chat(
            f"Today is 2025-03-{rng.randrange(10, 31)}.\n{rules}",
            question(rng),
            tools=rng.sample(offered, 7),
        )
        for _ in range(24)
    ]
    yield Case("both a date and shuffled tools", tuple(bodies), frozenset({"date", "tool_order"}))


def _clean_chats(rng: random.Random) -> Iterator[tuple[str, list[Body]]]:
    rules = prose(rng, 30)
    yield "one system prompt", [chat(rules, question(rng)) for _ in range(20)]
    rules = prose(rng, 30)
    yield (
        "dates in the questions",
        [chat(rules, f"On 2025-03-{rng.randrange(10, 31)}: {question(rng)}") for _ in range(20)],
    )
    yield (
        "ids in the questions",
        [
            chat(rules, f"Order {UUID(int=rng.getrandbits(128))}. {question(rng)}")
            for _ in range(20)
        ],
    )
    yield (
        "a date at the end",
        [
            chat(rules, f"{question(rng)} (asked 2025-03-{rng.randrange(10, 31)})")
            for _ in range(20)
        ],
    )
    yield (
        "the same date for all",
        [chat(f"Today is 2025-03-04.\n{rules}", question(rng)) for _ in range(20)],
    )
    yield "the same prompt again", [chat(rules, "Go on.") for _ in range(20)]
    yield "nothing shared", [chat(prose(rng, 8), question(rng)) for _ in range(20)]
    yield (
        "short ones",
        [
            {"model": "m", "messages": [{"role": "user", "content": question(rng)}]}
            for _ in range(30)
        ],
    )
    several = [prose(rng, 25) for _ in range(4)]
    yield "four applications", [chat(several[number % 4], question(rng)) for number in range(32)]
    greeting = "You are a careful assistant of a large company. Always be polite and honest."
    several = [f"{greeting}\n{prose(rng, 20)}" for _ in range(3)]
    yield (
        "three applications with one greeting",
        [chat(several[number % 3], question(rng)) for number in range(30)],
    )
    yield (
        "user id behind the rules",
        [chat(f"{rules}\nUser: u_{hexes(rng, 8)}", question(rng)) for _ in range(20)],
    )
    yield (
        "date behind the rules",
        [chat(f"{rules}\nNow: {moment}", question(rng)) for moment in _days(rng, 20)],
    )


def _clean_shapes(rng: random.Random) -> Iterator[tuple[str, list[Body]]]:
    rules = prose(rng, 30)
    yield "documents", [chat(rules, f"{prose(rng, 12)}\n\n{question(rng)}") for _ in range(20)]
    examples = "\n\n".join(f"Q: {question(rng)}\nA: {prose(rng, 1)}" for _ in range(8))
    yield (
        "few-shot",
        [
            chat("Answer like the examples.", f"{examples}\n\nQ: {question(rng)}\nA:")
            for _ in range(20)
        ],
    )
    offered = tools(rng, 8)
    yield "tools in one order", [chat(rules, question(rng), tools=offered) for _ in range(20)]
    sets = [tools(rng, 6) for _ in range(3)]
    roles = [prose(rng, 2) for _ in range(3)]
    yield (
        "three agents with other tools",
        [chat(roles[number % 3], question(rng), tools=sets[number % 3]) for number in range(24)],
    )
    yield "conversations that grow", list(_conversations(rng, rules, calls=False))
    yield "agents with call ids", list(_conversations(rng, rules, calls=True))
    pool = [prose(rng, 6) for _ in range(40)]
    yield (
        "documents picked from a pool",
        [chat(rules, "\n\n".join([*rng.sample(pool, 4), question(rng)])) for _ in range(24)],
    )
    languages = [prose(rng, 20), "Vous aidez les clients. " * 20, "Sie helfen den Kunden. " * 20]
    yield "three languages", [chat(languages[number % 3], question(rng)) for number in range(24)]
    yield (
        "code in the question",
        [
            chat(
                rules, "```json\n" + json.dumps(reordered(rng, {"a": 1, "b": 2, "c": 3})) + "\n```"
            )
            for _ in range(20)
        ],
    )


def _conversations(rng: random.Random, rules: str, *, calls: bool) -> Iterator[Body]:
    for _ in range(5):
        messages: list[dict[str, Any]] = [{"role": "system", "content": rules}]
        for _ in range(4):
            messages.append({"role": "user", "content": question(rng)})
            yield {"model": "m", "messages": list(messages)}
            if calls:
                call = f"call_{hexes(rng, 16)}"
                function = {
                    "name": "get_order",
                    "arguments": json.dumps({"id": rng.randrange(999)}),
                }
                invoked = [{"id": call, "type": "function", "function": function}]
                messages.append({"role": "assistant", "content": "", "tool_calls": invoked})
                messages.append({"role": "tool", "tool_call_id": call, "content": prose(rng, 2)})
                yield {"model": "m", "messages": list(messages)}
            messages.append({"role": "assistant", "content": prose(rng, 2)})


def _days(rng: random.Random, count: int) -> list[datetime]:
    start = datetime(2025, 3, 3, 7, 15, 9, tzinfo=UTC)
    return [start + timedelta(days=40) * rng.random() for _ in range(count)]


def cases(seed: int) -> list[Case]:
    """All cases, the same for the same seed."""
    rng = random.Random(seed)
    planted = list(planted_cases(rng))
    shapes = [*_clean_chats(rng), *_clean_shapes(rng)]
    clean = [Case(f"clean: {name}", tuple(bodies), frozenset()) for name, bodies in shapes]
    return [*planted, *clean, *_mixed_cases(rng, planted, clean)]
