"""Tool calls out of a model's text while it arrives. P.

Joined parts do not depend on how the text was cut, so streamed and unstreamed answers are equal. A
call is given out once its JSON is complete and names a known function; whatever only looks like a
call, or breaks off, is content. White space next to calls is not content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from worker.toolformat import CallStyle, ToolFormat


@dataclass(frozen=True, slots=True)
class Call:
    """One complete call."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


Part = str | Call
"""Content, or a call."""


class JsonExtent:
    """Finds where a JSON object or list ends, piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
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


class ToolReader:
    """Reads one answer. States are methods that take the text at hand and return what is left of
    it for the next state.

    :param names: functions that may be called.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str]) -> None:
        self._format, self._names = form, names
        self._state: Callable[[str], str] = self._content
        if form.style is CallStyle.BARE:
            self._state = self._beginning
        self._held = ""
        """Text that the state could not decide on yet."""
        self._space = ""
        """White space that is content only if content follows."""
        self._called = False
        self._raw: list[str] = []
        """What the present call has taken, marker included, ..."""
        self._body = 0
        """... and how many of these pieces come before its JSON."""
        self._extent = JsonExtent()
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """Add text; returns what became certain."""
        rest = self._held + text
        self._held = ""
        while rest:
            rest = self._state(rest)
        return self._give()

    def finish(self) -> list[Part]:
        """What was kept back. Call once."""
        if self._state == self._after:
            self._held = ""
        unfinished, self._raw = "".join(self._raw), []
        self._say(unfinished + self._held)
        if not self._called and self._space:
            self._parts.append(self._space)
        self._held = self._space = ""
        return self._give()

    # ---- states ----

    def _beginning(self, text: str) -> str:
        """Of an answer that is a call if it begins with a brace."""
        begun = text.lstrip()
        if not begun:
            return self._wait(text)
        if begun.startswith("{"):
            self._space = text[: len(text) - len(begun)]
            return self._open(begun, "")
        self._state = self._content
        return text

    def _content(self, text: str) -> str:
        opening = self._format.opening
        at = text.find(opening)
        if at >= 0:
            self._say(text[:at])
            self._raw = [opening]
            self._state = self._opened
            return text[at + len(opening) :]
        keep = _overlap(text, opening)
        self._say(text[: len(text) - keep])
        return self._wait(text[len(text) - keep :])

    def _opened(self, text: str) -> str:
        """Behind a marker: JSON must follow."""
        begun = text.lstrip()
        if not begun:
            return self._wait(text)
        first = "[{" if self._format.style is CallStyle.LISTED else "{"
        if begun[0] in first:
            return self._open(begun, text[: len(text) - len(begun)])
        return self._give_up(text)

    def _json(self, text: str) -> str:
        end = self._extent.feed(text)
        self._raw.append(text if end is None else text[:end])
        if end is None:
            return ""
        calls = decode_calls("".join(self._raw[self._body :]), self._format, self._names)
        if calls is None:
            return self._give_up(text[end:])
        self._raw, self._space, self._called = [], "", True
        self._parts += calls
        self._state = self._after
        return text[end:]

    def _after(self, text: str) -> str:
        """Behind a call: what closes it, or another one of the same kind."""
        mark = self._format.closing or (";" if self._format.style is CallStyle.BARE else "")
        begun = text.lstrip()
        if not begun or (mark and mark != begun and mark.startswith(begun)):
            return self._wait(text)
        if mark and begun.startswith(mark):
            if mark != ";":
                self._state = self._content
                return begun.removeprefix(mark)
            following = begun[1:].lstrip()
            if not following:
                return self._wait(text)
            if following.startswith("{"):
                return self._open(following, "")
        elif self._format.style is CallStyle.BARE and begun.startswith("{"):
            return self._open(begun, "")
        self._state = self._content
        return text

    # ---- steps ----

    def _open(self, text: str, before: str) -> str:
        """JSON begins with ``text``."""
        self._raw += [before] if before else []
        self._body = len(self._raw)
        self._extent = JsonExtent()
        self._state = self._json
        return text

    def _give_up(self, rest: str) -> str:
        """What looked like a call is content."""
        self._say("".join(self._raw))
        self._raw = []
        self._state = self._content
        return rest

    def _wait(self, text: str) -> str:
        """More is needed to decide."""
        self._held = text
        return ""

    def _say(self, text: str) -> None:
        whole = self._space + text
        said = whole.rstrip()
        self._space = whole[len(said) :]
        if said:
            self._parts.append(said)

    def _give(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


class _Written(msgspec.Struct):
    """A call as models write it."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


def decode_calls(text: str, form: ToolFormat, names: frozenset[str]) -> list[Call] | None:
    """The calls in a JSON text; None if it is anything else."""
    try:
        if form.style is CallStyle.LISTED and text.startswith("["):
            written = msgspec.json.decode(text, type=list[_Written])
        else:
            written = [msgspec.json.decode(text, type=_Written)]
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    calls = []
    for each in written:
        arguments = _arguments(bytes(each.arguments) or bytes(each.parameters))
        if each.name not in names or arguments is None:
            return None
        calls.append(Call(each.name, arguments))
    return calls or None


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


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``mark``, but not all of it."""
    return next(
        (n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0
    )
