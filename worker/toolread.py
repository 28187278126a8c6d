"""Tool calls out of a model's text while it arrives. P.

Joined parts do not depend on how the text was cut, so streamed and unstreamed answers are equal. A
call begins once its name is known and its arguments have begun as an object; from then on they are
given out as they come, as the model writes them. What is written in another order is given out once
its JSON is complete. Whatever only looks like a call, or breaks off before it has begun, is
content. White space next to calls is not content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from worker.calljson import HEAD_CHARS, Call, JsonExtent, decode_call, head_of
from worker.toolformat import CallStyle, ToolFormat


@dataclass(frozen=True, slots=True)
class Opened:
    """A call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the arguments of the call that began last; never empty."""

    text: str


Part = str | Opened | Arguments
"""Content, or a piece of a call."""


def gather(parts: Iterable[Part]) -> tuple[str, list[Call]]:
    """Content and calls of a whole answer."""
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        if isinstance(part, Opened):
            calls.append((part.name, []))
        elif isinstance(part, Arguments):
            calls[-1][1].append(part.text)
        else:
            content.append(part)
    return "".join(content), [Call(name, "".join(pieces)) for name, pieces in calls]


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
        self._listed = False
        """The present call is an item of a list."""
        self._raw: list[str] = []
        """What may become a call has taken, marker included, ..."""
        self._body = 0
        """... and how many of these pieces come before its JSON."""
        self._start = ""
        """The beginning of this JSON."""
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
            self._listed = False
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
        before = text[: len(text) - len(begun)]
        if begun.startswith("[") and self._format.style is CallStyle.LISTED:
            self._raw.append(before + "[")
            self._listed = True
            self._state = self._item
            return begun[1:]
        return self._open(begun, before) if begun.startswith("{") else self._give_up(text)

    def _item(self, text: str) -> str:
        """Within a list, where a call must follow."""
        begun = text.lstrip()
        if not begun:
            return self._wait(text)
        before = text[: len(text) - len(begun)]
        return self._open(begun, before) if begun.startswith("{") else self._give_up(text)

    def _json(self, text: str) -> str:
        """Within an object that has not shown yet whether it is a call."""
        self._raw.append(text)
        if len(self._start) < HEAD_CHARS:
            self._start = (self._start + text)[:HEAD_CHARS]
            head = head_of(self._start)
            if head is not None and head.name in self._names:
                rest = "".join(self._raw[self._body :])[head.end :]
                self._begin(head.name)
                self._extent = JsonExtent()
                self._state = self._arguments
                return rest
        end = self._extent.feed(text)
        if end is None:
            return ""
        self._raw[-1] = text[:end]
        call = decode_call("".join(self._raw[self._body :]), self._names)
        if call is None:
            return self._give_up(text[end:])
        self._begin(call.name)
        self._parts.append(Arguments(call.arguments))
        return self._end(text[end:])

    def _arguments(self, text: str) -> str:
        """Within the arguments of a call that has begun."""
        end = self._extent.feed(text)
        self._parts.append(Arguments(text if end is None else text[:end]))
        if end is None:
            return ""
        self._state = self._closing
        return text[end:]

    def _closing(self, text: str) -> str:
        """Behind the arguments: the object's end, or more members, which mean nothing."""
        begun = text.lstrip()
        if not begun:
            return self._wait(text)
        if begun.startswith("}"):
            return self._end(begun[1:])
        if begun.startswith(","):
            self._extent = JsonExtent(depth=1)
            self._state = self._more
            return begun
        return self._end(text)

    def _more(self, text: str) -> str:
        """Within members behind the arguments. They are content if the object never ends."""
        end = self._extent.feed(text)
        if end is None:
            self._raw.append(text)
            return ""
        self._raw = []
        return self._end(text[end:])

    def _between(self, text: str) -> str:
        """Behind an item of a list: another one, or the list's end."""
        begun = text.lstrip()
        if not begun:
            return self._wait(text)
        if begun.startswith(","):
            self._raw = [text[: len(text) - len(begun) + 1]]
            self._state = self._item
            return begun[1:]
        self._state = self._after
        return begun.removeprefix("]")

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
                return self._open(following, text[: len(text) - len(following)])
        elif self._format.style is CallStyle.BARE and begun.startswith("{"):
            return self._open(begun, text[: len(text) - len(begun)])
        self._state = self._content
        return text

    # ---- steps ----

    def _open(self, text: str, before: str) -> str:
        """JSON begins with ``text``."""
        self._raw += [before] if before else []
        self._body = len(self._raw)
        self._start = ""
        self._extent = JsonExtent()
        self._state = self._json
        return text

    def _begin(self, name: str) -> None:
        """It is a call."""
        self._raw, self._space, self._called = [], "", True
        self._parts.append(Opened(name))

    def _end(self, rest: str) -> str:
        """The call is over."""
        self._state = self._between if self._listed else self._after
        return rest

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


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``mark``, but not all of it."""
    return next(
        (n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0
    )
