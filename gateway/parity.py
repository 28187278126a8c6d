"""Does a worker make the same tokens of a prompt as the gateway does? Pure comparison.

Keys that are made here match a worker's cache only if both sides render and tokenise alike. That is
proved on a few short prompts (``gateway/feeds/parity.py`` asks the worker) and never assumed: a
second BOS, another chat template or another tokenizer makes every key wrong, in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NOT_PROVED = "not proved yet"
SHOWN = 12
"""Token ids that a reason quotes at most."""


class Verdict(StrEnum):
    """What the probe prompts have shown."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNPROVEN = "unproven"
    """Not asked yet, or the worker cannot be asked."""


@dataclass(frozen=True, slots=True)
class Parity:
    """The state of the proof for one worker incarnation."""

    verdict: Verdict = Verdict.UNPROVEN
    reason: str = NOT_PROVED
    """Empty if equal."""
    fix: str = ""
    """What an operator can do about it; empty if nothing is wrong."""
    compared: int = 0
    """Probe prompts whose tokens were compared."""


class Kind(StrEnum):
    """What a probe prompt is."""

    TEXT = "text"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe prompt. ``fields`` are those of an OpenAI request, without its model."""

    name: str
    kind: Kind
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one side made of a probe prompt."""

    tokens: Sequence[int] | None = None
    count: int | None = None
    """Only the number of tokens is known (from ``usage``)."""
    refused: str = ""
    """The chat template refuses these messages, or there is none: its words."""
    missing: str = ""
    """It could not be asked: why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One probe prompt on both sides."""

    probe: Probe
    ours: Answer
    theirs: Answer


_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_UNICODE = (
    "na\u00efve cafe\u0301 \u6771\u4eac \u0645\u0631\u062d\u0628\u0627 "
    "\U0001f469\u200d\U0001f4bb\u00a0\u2026 \ufb01 12345  \t\n\n x\u00b2"
)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


PROBES: tuple[Probe, ...] = (
    Probe("plain", Kind.TEXT, {"prompt": "The capital of France is Paris. 1 + 1 = 2"}),
    Probe("unicode", Kind.TEXT, {"prompt": _UNICODE}),
    Probe("chat", Kind.CHAT, {"messages": [_user("What is the capital of France?")]}),
    Probe(
        "system",
        Kind.CHAT,
        {"messages": [{"role": "system", "content": "Answer in one word."}, _user("2 + 2?")]},
    ),
    Probe(
        "multi-turn",
        Kind.CHAT,
        {
            "messages": [
                _user("Say hello in Japanese."),
                {"role": "assistant", "content": "\u3053\u3093\u306b\u3061\u306f"},
                _user(f"And now: {_UNICODE}"),
            ]
        },
    ),
    Probe("tools", Kind.CHAT, {"messages": [_user("Rain in Oslo?")], "tools": [_WEATHER]}),
)
"""A few hundred tokens in all."""


def judge(findings: Sequence[Finding], bos: int | None) -> Parity:
    """The verdict over all probe prompts.

    :param bos: the tokenizer's id for the beginning of a text; None: it has none.
    """
    compared = [one for one in findings if _comparable(one)]
    wrong = [one for one in compared if _differs(one)]
    if wrong:
        plain_is_wrong = any(one.probe.kind is Kind.TEXT for one in wrong)
        plain_is_right = any(one.probe.kind is Kind.TEXT for one in compared) and not plain_is_wrong
        reason, fix = _explain(wrong[0], bos, plain_is_right=plain_is_right)
        names = ", ".join(one.probe.name for one in wrong)
        reason = f"{reason} ({len(wrong)} of {len(compared)} probe prompts differ: {names})"
        return Parity(Verdict.DIFFERENT, reason, fix, len(compared))
    chats = any(one.probe.kind is Kind.CHAT for one in compared)
    if chats and not all(_is_count(one) for one in compared):
        return Parity(Verdict.EQUAL, "", "", len(compared))
    gaps = (one.ours.missing or one.theirs.missing for one in findings if not _comparable(one))
    why = next((gap for gap in gaps if gap), "no probe prompt was compared")
    if compared and not chats:
        why = f"plain prompts are equal, but chats could not be compared: {why}"
    return Parity(Verdict.UNPROVEN, why, compared=len(compared))


def _comparable(one: Finding) -> bool:
    return not (one.ours.missing or one.theirs.missing)


def _is_count(one: Finding) -> bool:
    """Equal lengths alone prove little."""
    return not one.theirs.refused and one.theirs.tokens is None


def _differs(one: Finding) -> bool:
    ours, theirs = one.ours, one.theirs
    if ours.refused or theirs.refused:
        return not (ours.refused and theirs.refused)
    if ours.tokens is None or theirs.tokens is None:
        return _size(ours) != _size(theirs)
    return list(ours.tokens) != list(theirs.tokens)


def _size(answer: Answer) -> int | None:
    return answer.count if answer.tokens is None else len(answer.tokens)


_SAME_FILES = (
    "give the gateway the engine's own files: [render] tokenizers, model name -> folder or hub id"
)
_SAME_TEMPLATE = (
    "start the engine with the model's own chat template (no --chat-template), or give the gateway "
    "a folder with the engine's: [render] tokenizers"
)


def _explain(one: Finding, bos: int | None, *, plain_is_right: bool) -> tuple[str, str]:
    """(what differs, what to do)."""
    ours, theirs = one.ours, one.theirs
    if theirs.refused and "jinja" in theirs.refused.lower():
        return f"the worker refuses the prompt: {theirs.refused}", "start llama-server with --jinja"
    if theirs.refused:
        return f"the worker refuses the prompt: {theirs.refused}", _SAME_TEMPLATE
    if ours.refused:
        return f"only the gateway's chat template refuses the prompt: {ours.refused}", _SAME_FILES
    if ours.tokens is None or theirs.tokens is None:
        reason = f"the worker counts {_size(theirs)} tokens, the gateway {_size(ours)}"
        return reason, _SAME_TEMPLATE if plain_is_right else _SAME_FILES
    here, there = list(ours.tokens), list(theirs.tokens)
    if bos is not None and there == [bos, *here]:
        twice = here[:1] == [bos]
        what = "a second BOS" if twice else "a BOS that the gateway does not expect"
        return f"the worker puts {what} in front", (
            "the chat template writes the BOS itself: the engine must not add another "
            "(add_special_tokens false for chats; a GGUF file without add_bos_token)"
            if twice
            else "set add_bos_token alike in both tokenizer_config.json files"
        )
    if bos is not None and here == [bos, *there]:
        return "the worker leaves the BOS out", _SAME_FILES
    if plain_is_right:
        return f"the worker renders chats by another template: {_where(here, there)}", (
            _SAME_TEMPLATE
        )
    return f"the worker has another tokenizer: {_where(here, there)}", _SAME_FILES


def _where(here: Sequence[int], there: Sequence[int]) -> str:
    pairs = enumerate(zip(here, there, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(here), len(there)))
    return (
        f"from token {at} on it has {list(there[at : at + SHOWN])}, "
        f"the gateway {list(here[at : at + SHOWN])}"
    )
