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
from worker.toolask import Function, ToolAsk


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
            return GrammarSpec("lark", "\n".join(["start: calls", *self._rules(ask)]), "tools")
        if form is None or form.kind != "json":
            return form
        answer = f"answer: {lark.json_of(msgspec.json.decode(form.source))}"
        rules = ["start: answer | calls", answer, *self._rules(ask)]
        return GrammarSpec("lark", "\n".join(rules), form.param)

    def _rules(self, ask: ToolAsk) -> list[str]:
        names = [f"f{index}" for index in range(len(ask.callable))]
        return [
            f"calls: {self._calls(single=ask.single)}",
            f"call: {' | '.join(names)}",
            *(
                f"{name}: {self._call(function)}"
                for name, function in zip(names, ask.callable, strict=True)
            ),
        ]

    def _calls(self, *, single: bool) -> str:
        def more(separator: str, item: str) -> str:
            return "" if single else f" ({lark.literal(separator)} {item})*"

        style = self.format.style
        if style is CallStyle.BARE:
            return "call" + more("; ", "call")
        if style is CallStyle.LISTED:
            return f'{self._mark(self.format.opening)} "[" call{more(", ", "call")} "]"'
        opening, closing = self._mark(self.format.opening), self._mark(self.format.closing)
        tagged = f'{opening} "\\n" call "\\n" {closing}'
        return tagged + more("\n", tagged)

    def _mark(self, text: str) -> str:
        token = self._marks[text]
        return lark.literal(text) if token is None else lark.added(token)

    def _call(self, function: Function) -> str:
        name = msgspec.json.encode(function.name).decode()
        head = f'{{"name": {name}, "{self.format.arguments}": '
        return f'{lark.literal(head)} {lark.json_of(function.parameters)} "}}"'
