"""Prompts from lines of JSON: requests, recorded sessions or lines of a batch file.

A prompt is looked at as far as its writer can change it: all that comes before the first answer.
Its parts stand in the order in which chat templates put them: system messages, tools, the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from shared.errors import HeadwaterError

MAX_CHARS = 200_000
"""Of one prompt; what comes later is not looked at."""
_SYSTEM = ("system", "developer")


class LintError(HeadwaterError):
    """A line is no prompt; the message is one line and names it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A message, the tools, or a plain prompt."""

    label: str
    """Role of the message, ``tools`` or ``prompt``."""
    text: str
    items: tuple[str, ...] = ()
    """For tools: each as canonical JSON."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request, as far as its writer can change it."""

    line: int
    at: float | None
    """Seconds since the epoch, if the line tells."""
    model: str
    parts: tuple[Part, ...]
    stands_for: int = 1
    """Requests of the traffic: more than one, if only some were kept."""


def read_prompts(lines: Iterable[bytes]) -> Iterator[Prompt]:
    """All prompts, in order; empty lines are skipped.

    :raises LintError: a line holds no prompt.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LintError(f"line {number} is no JSON: {error}") from error
        body = _body(row)
        if body is None:
            raise LintError(f"line {number} is no request: it has neither 'messages' nor 'prompt'")
        parts = _parts(body)
        if parts is None:
            raise LintError(f"line {number}: its messages, tools or prompt have no known form")
        stands_for = row.get("of")
        if not isinstance(stands_for, int) or isinstance(stands_for, bool) or stands_for < 1:
            stands_for = 1
        yield Prompt(number, _time(row), str(body.get("model") or ""), parts, stands_for)


def _body(row: Any) -> dict[str, Any] | None:
    """The request in a line: the line itself, or what a batch file or a log keeps it under."""
    for _ in range(3):
        if not isinstance(row, dict):
            return None
        if "messages" in row or "prompt" in row:
            return row
        row = row.get("body") or row.get("request")
    return None


def _time(row: dict[str, Any]) -> float | None:
    for name in ("timestamp", "at", "created", "time"):
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value / 1000 if value > 1e11 else float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return None


def _parts(body: dict[str, Any]) -> tuple[Part, ...] | None:
    messages, prompt = body.get("messages"), body.get("prompt")
    if messages is None:
        if isinstance(prompt, list):
            prompt = prompt[0] if len(prompt) == 1 else None
        return (Part("prompt", prompt[:MAX_CHARS]),) if isinstance(prompt, str) else None
    tools = body.get("tools") or []
    if not isinstance(messages, list) or not isinstance(tools, list):
        return None
    said: list[Part] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return None
        if message["role"] in ("assistant", "tool", "function"):
            break
        said.append(Part(message["role"], _text(message.get("content"))))
    ahead = next((at for at, part in enumerate(said) if part.label not in _SYSTEM), len(said))
    if tools:
        items = tuple(canonical(tool) for tool in tools)
        said.insert(ahead, Part("tools", json.dumps(tools, ensure_ascii=False), items))
    return _cut(said)


def _cut(parts: list[Part]) -> tuple[Part, ...]:
    kept, left = [], MAX_CHARS
    for part in parts:
        if left <= 0:
            break
        text = part.text[:left]
        kept.append(part if len(text) == len(part.text) else Part(part.label, text))
        left -= len(text)
    return tuple(kept)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def canonical(value: Any) -> str:
    """JSON that is equal for equal values, however their keys were ordered."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
