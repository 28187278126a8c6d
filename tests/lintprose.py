"""Texts, questions and tools of made-up applications, to judge ``headwater lint`` by."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

_SUBJECTS = (
    "the customer",
    "a passenger",
    "the agent on duty",
    "your supervisor",
    "the warehouse",
    "an account holder",
    "the billing team",
    "a new colleague",
    "the reviewer",
    "the person who calls",
)
_VERBS = (
    "must confirm",
    "may change",
    "should never reveal",
    "has to record",
    "can ask about",
    "is expected to check",
    "will usually forget",
    "needs to approve",
    "wants to see",
    "may cancel",
)
_OBJECTS = (
    "the delivery address",
    "an open invoice",
    "the terms of the contract",
    "a second signature",
    "the state of the order",
    "the list of allowed refunds",
    "a note in the journal",
    "the seat that was booked",
    "personal data of others",
    "the reason for the delay",
)
_ENDS = (
    "before anything else happens",
    "unless the policy says otherwise",
    "when the amount is above the limit",
    "in plain and short sentences",
    "even if the request is urgent",
    "without naming internal systems",
    "as soon as both sides agree",
    "only after the identity is known",
    "during the first exchange",
    "and then wait for an answer",
)
_QUESTIONS = (
    "Where is my parcel",
    "How do I cancel the subscription",
    "Can you move my flight to the evening",
    "Why was I charged twice",
    "What does the warranty cover",
    "Please summarise the meeting notes",
    "Is there a cheaper plan for students",
    "My screen stays black, what now",
    "Translate this letter for my landlord",
    "Which documents do I need for the visa",
    "Write a limerick about rain",
    "Explain recursion to a child",
)
NAMES = (
    "Amara",
    "Bjorn",
    "Chiara",
    "Dmitri",
    "Eun-ji",
    "Farid",
    "Greta",
    "Hiro",
    "Ines",
    "Jonas",
    "Keiko",
    "Luis",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of one application (or of some, mixed), and the causes planted in them."""

    name: str
    bodies: tuple[Body, ...]
    causes: frozenset[str]


def prose(rng: random.Random, sentences: int) -> str:
    """Rules as a system prompt holds them, some in paragraphs and some in lists."""
    parts = []
    for number in range(sentences):
        words = " ".join(map(rng.choice, (_SUBJECTS, _VERBS, _OBJECTS, _ENDS))) + "."
        words = words[0].upper() + words[1:]
        parts.append(f"\n- {words}" if number % 7 > 4 else f" {words}")
    return "".join(parts).strip()


def question(rng: random.Random) -> str:
    """What one user asks: never the same twice."""
    concern, case = rng.choice(_OBJECTS), rng.randrange(10**6)
    return f"{rng.choice(_QUESTIONS)}? It concerns {concern}, case {case}."


def chat(system: str, user: str, **more: Any) -> Body:
    """A request to the chat endpoint."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "m", "messages": messages, **more}


def tools(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Function definitions of a plausible size."""
    verbs = ["get", "find", "cancel", "update", "list", "book", "send", "refund", "check"]
    nouns = ["order", "flight", "user", "invoice", "seat", "ticket", "address", "note"]
    names = rng.sample([f"{verb}_{noun}" for verb in verbs for noun in nouns], count)
    return [_tool(rng, name) for name in names]


def _tool(rng: random.Random, name: str) -> dict[str, Any]:
    properties = {
        key: {
            "type": "string",
            "description": f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)}",
        }
        for key in rng.sample(["id", "reason", "amount", "when", "note", "channel"], 3)
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)[:2]}
    function = {"name": name, "description": prose(rng, 1), "parameters": schema}
    return {"type": "function", "function": function}


def reordered(rng: random.Random, value: Any) -> Any:
    """The same JSON value with the keys of every object in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: reordered(rng, value[key]) for key in keys}
    return [reordered(rng, item) for item in value] if isinstance(value, list) else value


def hexes(rng: random.Random, length: int) -> str:
    """Digits of an id."""
    return "".join(rng.choice("0123456789abcdef") for _ in range(length))
