"""Tokens as bytes and as text, for answers and for log-probabilities: P, no I/O.

A token of a byte-level or byte-fallback vocabulary can be part of a character. Its exact bytes are
what joins to the answer; where they are no UTF-8, OpenAI's ``bytes:\\xe4\\xbd`` form is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import copy

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, by its character."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    spare = (byte for byte in range(256) if byte not in set(plain))
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(spare)})
    return alphabet


class TokenText:
    """Bytes and text of token ids of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._show = False
        decoder = json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
        self._alphabet = _byte_alphabet() if '"ByteLevel"' in decoder else {}
        self._falls_back = '"ByteFallback"' in decoder
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token: item.content for token, item in added.items()}
        self._special = frozenset(token for token, item in added.items() if item.special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a part of an answer: special tokens are left out, broken UTF-8 is U+FFFD.

        The library shows a whole run of fallback bytes as broken if one of them is, and so loses
        the whole characters beside it. Such a run is put together here.
        """
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        if not self._falls_back or REPLACEMENT not in text:
            return text
        exact = b"".join(map(self.bytes_of, tokens)).decode(errors="replace")
        # Some tokenizers leave out the blank at the beginning.
        return exact[1:] if exact.startswith(" ") and not text.startswith(" ") else exact

    def bytes_of(self, token: int) -> bytes:
        """What the token adds to the answer; empty for unknown ids, and special tokens unless they
        are shown."""
        return b"" if token in self._special and not self._show else self._raw(token)

    def with_specials(self) -> TokenText:
        """For an answer whose text shows special tokens."""
        shown = copy(self)
        shown._show = True
        return shown

    @property
    def specials(self) -> dict[int, str]:
        """All special tokens, as they are written."""
        return {token: self._added[token] for token in self._special}

    def added_id(self, text: str) -> int | None:
        """The id of the added token that is written like this, if there is one."""
        token = self._tokenizer.token_to_id(text)
        return token if token in self._added else None

    def is_special(self, token: int) -> bool:
        """Whether the token is left out of an answer's text."""
        return token in self._special

    def text_of(self, token: int) -> str:
        """The token for people: its text, or ``bytes:\\x..``; special ones by name."""
        raw = self._raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _raw(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._alphabet:
            if all(char in self._alphabet for char in piece):
                return bytes(self._alphabet[char] for char in piece)
            return piece.encode()
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes((int(match[1], 16),))
        return piece.replace(_METASPACE, " ").encode()
