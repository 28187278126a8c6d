"""How a gateway tells our worker which leading tokens of a prompt all tenants may share.

An operator approves beginnings of prompts; a prompt that begins with one is salted only behind it.
Gateways alone have the list. Beside the salt they send how many tokens the approved beginning has,
and a code over them under the deployment's secret. The worker computes it again over the tokens
that *it* found in the prompt: what is not approved to the last token is salted from the first on,
however the two sides read the text, and whoever sent the header. Headers of clients whose names
begin with ``x-headwater-`` end at the gateway.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

HEADER = "x-headwater-shared-prefix"
"""``TOKENS:CODE``. For our own workers only: no other engine is sent it."""

_VERSION = b"headwater shared prefix 1"
_CODE_BYTES = 16
_FORM = re.compile(r"([1-9][0-9]{0,9}):([0-9a-f]{32})", re.ASCII)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The claim that a prompt's first tokens are approved."""

    tokens: int
    """How many; at least 1."""
    code: str

    @classmethod
    def of(cls, secret: bytes, root: bytes, packed: bytes) -> SharedPrefix:
        """For approved tokens.

        :param secret: the deployment's.
        :param root: of the scope without a salt (16 bytes): model, tokenizer and adapter.
        :param packed: the approved tokens, as little-endian u32.
        """
        return cls(len(packed) // 4, _code(secret, root, packed))

    @classmethod
    def read(cls, text: str | None) -> SharedPrefix | None:
        """What stands in the header; None for anything that is no claim."""
        found = _FORM.fullmatch(text or "")
        return None if found is None else cls(int(found[1]), found[2])

    @property
    def text(self) -> str:
        """For the header."""
        return f"{self.tokens}:{self.code}"

    def holds(self, secret: bytes, root: bytes, packed: bytes) -> bool:
        """Whether a prompt (all its tokens, packed) begins with exactly what was approved."""
        size = 4 * self.tokens
        if len(packed) < size:
            return False
        return hmac.compare_digest(self.code, _code(secret, root, packed[:size]))


def _code(secret: bytes, root: bytes, packed: bytes) -> str:
    return hmac.digest(secret, _VERSION + root + packed, "sha256")[:_CODE_BYTES].hex()
