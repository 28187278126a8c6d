"""The JSON of tool calls as models write it: where it ends, and what it says. P."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{\s*["}])',
    re.DOTALL,
)
"""A call up to its arguments, which must go on like an object."""
HEAD_CHARS = 4096
"""It is looked for in so much of a text."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call, put together."""

    name: str
    arguments: str
    """A JSON object as the model wrote it; cut off if the answer was."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a call."""

    name: str
    end: int
    """Index of the brace that opens the arguments."""


class JsonExtent:
    """Finds where a JSON object or list ends, piece by piece.

    :param depth: how many of them are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Index behind the end, if it lies in this piece. The first character opens the value."""
        for index, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


def head_of(text: str) -> Head | None:
    """The call that a text begins with, once its arguments have begun as an object."""
    found = _HEAD.match(text)
    return Head(_string(found[1]), found.end()) if found else None


class _Written(msgspec.Struct):
    """A call as models write it."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


def decode_call(text: str, names: frozenset[str]) -> Call | None:
    """The call in a complete JSON text; None if it is anything else."""
    try:
        written = msgspec.json.decode(text, type=_Written)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    arguments = _arguments(bytes(written.arguments) or bytes(written.parameters))
    if written.name not in names or arguments is None:
        return None
    return Call(written.name, arguments)


def _string(quoted: str) -> str:
    """The value of a JSON string; empty, which no function is called, if it is none."""
    try:
        return msgspec.json.decode(quoted, type=str)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return ""


def _arguments(raw: bytes) -> str | None:
    """The text of an object; some models write it as a string. None for anything else."""
    if raw in (b"", b"null"):
        return "{}"
    if raw.startswith(b'"'):
        raw = msgspec.json.decode(raw, type=str).encode()
        try:
            msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return None
        raw = raw.strip()
    return raw.decode() if raw.startswith(b"{") else None
