"""Workloads as values: sessions of turns, and the text in them. Equal seeds, equal text. Pure.

Every text begins with the workload's *mark*, so that two runs that must not help each other (two
policies, say) share nothing although they are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el"))
TURN_WORDS = 60
"""Words of a user's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a workload is; what a workload does not know it ignores."""

    sessions: int = 40
    groups: int = 4
    """System prompts, documents, tool sets or example sets that sessions share."""
    turns: int = 5
    shared_words: int = 600
    """Length of what is shared; about 1.3 tokens a word."""
    max_tokens: int = 32


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: what is added to the conversation before it is sent."""

    messages: tuple[dict[str, Any], ...]
    max_tokens: int
    prompt: str = ""
    """A text completion instead of a chat."""
    think_s: float = 0.0
    """After the answer before."""


@dataclass(frozen=True, slots=True)
class Session:
    """Turns one after the other; answers become part of the conversation."""

    turns: tuple[Turn, ...]
    start_s: float | None = None
    """At its own time; None: when its turn comes."""


Make = Callable[[Shape, Random, str], list[Session]]


def text(rng: Random, words: int) -> str:
    """Words of two or three syllables."""
    made = ("".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))) for _ in range(words))
    return " ".join(made)


def opening(*of: object) -> str:
    """Words that another ``of`` does not begin with: nothing behind them is shared."""
    return text(Random(repr(of)), 3)


def _system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def multiturn(shape: Shape, rng: Random, mark: str) -> list[Session]:
    """Chats over a few system prompts, each turn with the whole history."""
    systems = [f"{mark} {text(rng, shape.shared_words)}" for _ in range(shape.groups)]
    sessions = []
    for number in range(shape.sessions):
        first = (_system(systems[number % shape.groups]), _user(text(rng, TURN_WORDS)))
        later = [(_user(text(rng, TURN_WORDS)),) for _ in range(shape.turns - 1)]
        sessions.append(_session([first, *later], shape))
    return _mixed(sessions, rng)


def rag(shape: Shape, rng: Random, mark: str) -> list[Session]:
    """Questions about a few documents, the document first."""
    documents = [f"{mark} {text(rng, 3 * shape.shared_words)}" for _ in range(shape.groups)]
    sessions = [
        _session([(_user(f"{documents[n % shape.groups]}\n\n{text(rng, 20)}?"),)], shape)
        for n in range(shape.sessions * shape.turns)
    ]
    return _mixed(sessions, rng)


def agent(shape: Shape, rng: Random, mark: str) -> list[Session]:
    """Agents with long instructions, whose tools answer with long texts."""
    systems = [f"{mark} {text(rng, 2 * shape.shared_words)}" for _ in range(shape.groups)]
    sessions = []
    for number in range(shape.sessions):
        first = (_system(systems[number % shape.groups]), _user(text(rng, TURN_WORDS)))
        steps = [(_user(f"Result: {text(rng, 150)}"),) for _ in range(2 * shape.turns - 1)]
        sessions.append(_session([first, *steps], shape))
    return _mixed(sessions, rng)


def fewshot(shape: Shape, rng: Random, mark: str) -> list[Session]:
    """Text completions behind a long row of examples."""
    rows = [f"{mark} {text(rng, 2 * shape.shared_words)}" for _ in range(shape.groups)]
    return _mixed(
        [
            Session(
                (Turn((), shape.max_tokens, f"{rows[n % shape.groups]}\nQ: {text(rng, 15)}\nA:"),)
            )
            for n in range(shape.sessions * shape.turns)
        ],
        rng,
    )


def unique(shape: Shape, rng: Random, mark: str) -> list[Session]:
    """Nothing is shared: what affinity must not make worse."""
    return [
        _session([(_user(f"{opening(mark, n)} {text(rng, shape.shared_words)}"),)], shape)
        for n in range(shape.sessions * shape.turns)
    ]


WORKLOADS: dict[str, Make] = {
    "multiturn": multiturn,
    "rag": rag,
    "agent": agent,
    "fewshot": fewshot,
    "unique": unique,
}


def _session(turns: list[tuple[dict[str, Any], ...]], shape: Shape) -> Session:
    return Session(tuple(Turn(messages, shape.max_tokens) for messages in turns))


def _mixed(sessions: list[Session], rng: Random) -> list[Session]:
    rng.shuffle(sessions)
    return sessions
