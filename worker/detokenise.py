"""Tokens to text while they arrive: whole characters only, and nothing past a stop string.

All three classes are fed in order and hold only what may still change. Joined output does not
depend on how the tokens were grouped, so streamed and unstreamed answers are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

CONTEXT_TOKENS = 6
"""How many of the prompt's last tokens are decoded in front of the answer (for leading spaces)."""

NOTHING_SHOWN: Mapping[int, str] = MappingProxyType({})

MAX_PENDING_TOKENS = 256
"""So many tokens without a clean end are bytes that never become text; they are given out as is."""


class Detokenizer:
    """Text of a growing answer, given out up to the last whole character.

    Only a window ``_ids`` is decoded; its first ``_settled`` tokens have been given out and serve
    as context. A window that ends in U+FFFD may be an unfinished character, so its trailing
    replacement characters are kept back until a token settles them.

    :param decode: token ids to text; invalid bytes become U+FFFD.
    :param prompt: the prompt's tokens; the answer continues their text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._settled = len(self._ids)
        settled = decode(self._ids) if self._ids else ""
        if settled.endswith(REPLACEMENT):
            # The prompt was cut inside a character: its rest cannot be joined with it any more.
            self._ids, self._settled, settled = [], 0, ""
        self._given = len(settled)

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became certain, maybe none."""
        self._ids.extend(ids)
        window = self._decode(self._ids)
        if len(self._ids) - self._settled > MAX_PENDING_TOKENS:
            return self._settle(window)
        certain = window.rstrip(REPLACEMENT)
        if len(certain) <= self._given:
            return ""
        if len(certain) == len(window):
            return self._settle(window)
        text, self._given = certain[self._given :], len(certain)
        return text

    def finish(self) -> str:
        """What was kept back, unfinished characters as U+FFFD."""
        return self._settle(self._decode(self._ids))

    def _settle(self, window: str) -> str:
        text = window[self._given :]
        del self._ids[: self._settled]
        self._settled = len(self._ids)
        self._given = len(self._decode(self._ids)) if self._ids else 0
        return text


class Piece(NamedTuple):
    """Text to give out, and the stop string that ended the answer right after it."""

    text: str
    stop: str | None = None

    def followed_by(self, later: Piece) -> Piece:
        """Both as one."""
        return Piece(self.text + later.text, later.stop)


class StopMatcher:
    """Gives out text up to the first stop string to be complete; of several that end together, the
    longest. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``include``: the stop string itself is given out too."""
        self._include = include
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Piece:
        """Add text. After a piece with ``stop`` nothing may follow."""
        if not self._stops:
            return Piece(text)
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return Piece(text[: end if self._include else start], stop)
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return Piece(text[: len(text) - keep])

    def finish(self) -> str:
        """What was held back: the text ended before the stop string was complete."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class AnswerText:
    """Detokenizer and stop strings of one answer.

    Stop strings are looked for only in text that arrives once ``min_tokens`` tokens are there.

    :param shown: special tokens that have a text all the same.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        min_tokens: int,
        shown: Mapping[int, str] = NOTHING_SHOWN,
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include=include_stop)
        self._min_tokens = min_tokens
        self._searching = min_tokens == 0
        self._shown = shown

    def push(self, token: int, output_len: int) -> Piece:
        """Add a token; ``output_len`` counts it."""
        self._searching = output_len >= self._min_tokens
        if token in self._shown:
            return self._match(self._detokenizer.finish() + self._shown[token])
        return self._match(self._detokenizer.push((token,)))

    def finish(self) -> Piece:
        """The rest, when the answer ends for another reason than a stop string. Call once."""
        piece = self._match(self._detokenizer.finish())
        if piece.stop is not None:
            return piece
        return Piece(piece.text + self._matcher.finish())

    def _match(self, text: str) -> Piece:
        return self._matcher.push(text) if self._searching else Piece(text)
