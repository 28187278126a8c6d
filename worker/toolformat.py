"""How models write tool calls, and grammars that make them do so. P.

Hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call (Qwen too)
Mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
Llama    {"name": ..., "parameters": {...}}; ..., maybe behind <|python_tag|>
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import xxhash

from worker import lark
from worker.guide import GrammarSpec
from worker.toolask import ToolAsk


class CallStyle(StrEnum):
    """How calls stand beside each other."""

    TAGGED = "tagged"
    """Each between markers of its own."""
    LISTED = "listed"
    """One JSON list behind a marker."""
    BARE = "bare"
    """Objects, separated by semicolons; a marker may come first."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls."""

    style: CallStyle
    opening: str
    closing: str
    """Empty if nothing closes a call."""
    arguments: str
    """Name of the member that holds the arguments."""
    id_chars: int
    """Length of call ids; Mistral's templates insist on theirs."""

    def call_id(self, *place: object) -> str:
        """An id for the call at this place, the same at each time."""
        digest = xxhash.xxh3_128_hexdigest(":".join(map(str, place)).encode())
        return digest[:9] if self.id_chars == 9 else f"call_{digest[: self.id_chars - 5]}"


HERMES = ToolFormat(CallStyle.TAGGED, "<tool_call>", "</tool_call>", "arguments", 29)
MISTRAL = ToolFormat(CallStyle.LISTED, "[TOOL_CALLS]", "", "arguments", 9)
LLAMA = ToolFormat(CallStyle.BARE, "<|python_tag|>", "", "parameters", 29)


def format_of(template: str | None) -> ToolFormat:
    """The format that a chat template teaches; Hermes' if it teaches none."""
    source = template or ""
    if MISTRAL.opening in source:
        return MISTRAL
    if HERMES.opening not in source and (
        LLAMA.opening in source or '"parameters": dictionary' in source
    ):
        return LLAMA
    return HERMES


class ToolSpeech:
    """A model's format together with the tokens that its tokenizer has for the markers.

    :param added_id: the id of a text that is one added token; None if it is ordinary text.
    :param is_special: whether a token is left out of an answer's text.
    """

    def __init__(
        self,
        form: ToolFormat,
        added_id: Callable[[str], int | None],
        is_special: Callable[[int], bool],
    ) -> None:
        self.format = form
        self._marks = {text: added_id(text) for text in (form.opening, form.closing) if text}
        self.shown = {
            token: text
            for text, token in self._marks.items()
            if token is not None and is_special(token)
        }
        """Special tokens that must be seen in the text of an answer, and how."""

    def grammar(self, ask: ToolAsk, form: GrammarSpec | None) -> GrammarSpec | None:
        """What the answer must be, given the form of answers that are no calls."""
        if ask.required:
            rules = [f"start: {self._calls(single=ask.single)}", *_call_rules(self.format, ask)]
            return GrammarSpec("lark", "\n".join(rules), "tools")
        if form is None:
            if not ask.guarded:
                return None
            rules = [*self._free(single=ask.single), *_call_rules(self.format, ask, free=True)]
            return GrammarSpec("lark", "\n".join(rules), "tools")
        if form.kind != "json":
            return form
        answer = f"answer: {lark.json_of(msgspec.json.decode(form.source))}"
        start = f"start: answer | {self._calls(single=ask.single)}"
        return GrammarSpec(
            "lark", "\n".join([start, answer, *_call_rules(self.format, ask)]), form.param
        )

    def _calls(self, *, single: bool) -> str:
        """Calls and nothing else."""
        style = self.format.style
        if style is CallStyle.BARE:
            return self._behind_mark(single=single)
        first = f"{self._mark(self.format.opening)} {self._behind_mark(single=single)}"
        if style is CallStyle.LISTED or single:
            return first
        return f'{first} ("\\n" {first})*'

    def _behind_mark(self, *, single: bool) -> str:
        """Calls behind the marker that opens them; one of tagged ones."""

        def more(separator: str) -> str:
            return "" if single else f" ({lark.literal(separator)} call)*"

        style = self.format.style
        if style is CallStyle.BARE:
            return "call" + more("; ")
        if style is CallStyle.LISTED:
            return f'"[" call{more(", ")} "]"'
        return f'"\\n" call "\\n" {self._mark(self.format.closing)}'

    def _free(self, *, single: bool) -> list[str]:
        """Text in which the marker, and for bare calls a brace at the beginning, begins calls."""
        # A lazy rule ends with the first marker: no text goes on over one. A token needs none.
        lazy = "[lazy]" if self._marks[self.format.opening] is None else ""
        opening = f"opening{lazy}: TEXT {self._mark(self.format.opening)}"
        calls = self._behind_mark(single=single)
        if self.format.style is CallStyle.BARE:
            return [f"start: TEXT | {calls} | opening {calls}", opening, f"TEXT: /{lark.NO_BRACE}/"]
        start = "start: TEXT | tool" if single else "start: tool* TEXT"
        return [start, f"tool: opening {calls}", opening, f"TEXT: /{lark.ANYTHING}/"]

    def _mark(self, text: str) -> str:
        token = self._marks[text]
        return lark.literal(text) if token is None else lark.added(token)


def _call_rules(form: ToolFormat, ask: ToolAsk, *, free: bool = False) -> list[str]:
    """Rules of ``call``.

    :param free: the model need not call; only strict functions have their schema enforced.
    """
    rules = []
    for index, function in enumerate(ask.callable):
        name = msgspec.json.encode(function.name).decode()
        head = f'{{"name": {name}, "{form.arguments}": '
        schema = function.parameters if function.strict or not free else {"type": "object"}
        rules.append(f'f{index}: {lark.literal(head)} {lark.json_of(schema)} "}}"')
    choice = " | ".join(f"f{index}" for index in range(len(rules)))
    return [f"call: {choice}", *rules]
