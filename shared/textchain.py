"""Text-block mode: keys for models without a tokenizer, over 64-byte pieces of the text.

Such keys agree only among gateways: no engine event can be matched to them, so they serve learned
routing at most. ``Scope.tokenizer`` is ``"text"`` there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from shared.blocks import extend_chain, pack_tokens
from shared.openai import GenerateRequest, RouteKind
from shared.types import BlockKey


@dataclass(frozen=True, slots=True)
class EncodedChain:
    """A prompt as routing sees it."""

    n_tokens: int
    """0 if not known (text-block mode)."""
    token_bytes: bytes
    """Token ids as little-endian u32; the text in UTF-8 in text-block mode."""
    keys: list[BlockKey]
    """One per full granule."""
    hash_s: float = field(default=0.0, compare=False)
    """Seconds spent on the keys; the rest went into the tokens."""


class TextChain:
    """Stands in for a ``Renderer`` where there is no tokenizer. Stateless."""

    def chain(self, request: GenerateRequest, scope_root: bytes) -> EncodedChain:
        """Keys of the first prompt's text."""
        data = plain_bytes(request)
        return EncodedChain(0, data, extend_chain(scope_root, data)[0])

    def new_text_bytes(self, request: GenerateRequest) -> int:
        """Nothing is encoded, ever."""
        del request
        return 0


def plain_bytes(request: GenerateRequest) -> bytes:
    """The canonical bytes of a request's first prompt: they grow at the end as a chat grows."""
    if request.kind is RouteKind.CHAT:
        pieces = [] if request.tools is None else [msgspec.json.encode(request.tools), b"\n"]
        for message in request.messages or ():
            content = message.get("content")
            text = content.encode() if isinstance(content, str) else _json(content)
            calls = message.get("tool_calls")
            pieces += (str(message["role"]).encode(), b"\n", text, _json(calls or None), b"\n")
        return b"".join(pieces)
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt.encode()
    first = prompt[0] if prompt else ""
    if isinstance(first, str):
        return first.encode()
    return pack_tokens(prompt if isinstance(first, int) else first)  # type: ignore[arg-type]


def _json(value: object) -> bytes:
    return b"" if value is None else msgspec.json.encode(value)
