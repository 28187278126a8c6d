"""What a grammar lets an answer say: the seam to the library that knows grammars. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as a request describes it."""

    kind: Literal["json", "regex", "lark"]
    source: str
    """A JSON schema as text, a regular expression, or rules in llguidance's Lark dialect."""
    param: str
    """The field of the request to blame."""


class Guide(Protocol):
    """How far one answer has come in its grammar. Belongs to the engine thread.

    It moves only with tokens that are committed, and a preempted sequence keeps its tokens, so it
    never has to go back.
    """

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing more may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further, in one line; None while it can."""
        ...

    def allowed(self) -> bytes:
        """Tokens that may follow: token ``t`` is bit ``t % 8`` of byte ``t // 8``.

        End tokens are among them where the answer may end. Never empty while ``error`` is None.
        """
        ...

    def advance(self, token: int) -> None:
        """Take in the token that was chosen; one that is not allowed sets ``error``."""
        ...


class Grammar(Protocol):
    """A compiled grammar; immutable, and good for any number of answers."""

    def start(self) -> Guide:
        """A guide at the beginning of an answer. Call on the engine thread."""
        ...


def without(mask: bytes, tokens: frozenset[int]) -> bytes:
    """``mask`` without ``tokens``; as it is, if nothing else were left."""
    kept = bytearray(mask)
    for token in tokens:
        if token // 8 < len(kept):
            kept[token // 8] &= 0xFF ^ (1 << token % 8)
    return bytes(kept) if kept.count(0) < len(kept) else mask


def allows(mask: bytes, token: int) -> bool:
    """Whether a mask holds a token."""
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)
