"""Text-block mode: keys for models without a tokenizer, over 64-byte pieces of the text.

Such keys agree only among gateways: no engine event can be matched to them, so they serve learned
routing at most. ``Scope.tokenizer`` is ``"text"`` there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
import xxhash

from shared.blocks import GRANULE_BYTES, extend_chain, pack_tokens
from shared.openai import CHAT, GenerateRequest
from shared.types import BlockKey


@dataclass(slots=True)
class EncodedChain:
    """A prompt as routing sees it. Not to be changed (not frozen, for that would take as long to
    make as to hash a short prompt)."""

    n_tokens: int
    """0 if not known (text-block mode)."""
    token_bytes: bytes
    """Token ids as little-endian u32; the text in UTF-8 in text-block mode."""
    keys: Sequence[BlockKey]
    """One per full granule."""
    hash_s: float = field(default=0.0, compare=False)
    """Seconds spent on the keys; the rest went into the tokens."""


PAGE_BYTES = 64 * GRANULE_BYTES
"""So much text is looked up at once."""
_PAGES = 4096
"""Pages remembered, up to twice as many: 8 MB."""

_Mark = tuple[bytes, bytes, bytes]
"""Chain state before a page, hash of the page, and whose memory it is."""


class TextChain:
    """Stands in for a ``Renderer`` where there is no tokenizer.

    Remembers which keys follow on a chain state and a page of text, so that a chat's next turn
    costs one hash for each page of what was there before. For one thread.
    """

    def __init__(self) -> None:
        self._young: dict[_Mark, tuple[array[int], bytes]] = {}
        self._old: dict[_Mark, tuple[array[int], bytes]] = {}

    def chain(self, request: GenerateRequest, scope_root: bytes) -> EncodedChain:
        """Keys of the first prompt's text."""
        data = plain_bytes(request)
        return EncodedChain(0, data, self.keys(scope_root, data, request.cache_salt or ""))

    def takes_long(self, request: GenerateRequest, text_bytes: int) -> bool:
        """Nothing is rendered or encoded, ever."""
        del request, text_bytes
        return False

    def keys(self, state: bytes, data: bytes, salt: str = "") -> Sequence[BlockKey]:
        """As ``extend_chain(state, data)[0]``; many of them as an array, of which a slice is a copy
        of bytes and takes no look at each.

        :param salt: whose memory it is: what one has sent must not be quicker for another.
        """
        if len(data) < PAGE_BYTES:
            return extend_chain(state, data)[0]
        whose = salt.encode("utf-8", "surrogatepass")
        keys, view = array("Q"), memoryview(data)  # of which a page is no copy
        for start in range(0, len(data) - PAGE_BYTES + 1, PAGE_BYTES):
            following, state = self._page(state, view[start : start + PAGE_BYTES], whose)
            keys += following
        rest = len(data) // PAGE_BYTES * PAGE_BYTES
        keys.extend(extend_chain(state, data[rest:])[0])
        return cast("Sequence[BlockKey]", keys)

    def _page(self, state: bytes, page: memoryview, whose: bytes) -> tuple[array[int], bytes]:
        """Keys of one page, and the state after it."""
        mark = state, xxhash.xxh3_128_digest(page), whose
        known = self._young.get(mark)
        if known is None:
            known = self._old.get(mark)
            if known is None:
                keys, after = extend_chain(state, bytes(page))
                known = array("Q", keys), after
            if len(self._young) >= _PAGES:
                self._old, self._young = self._young, {}
            self._young[mark] = known
        return known


def plain_bytes(request: GenerateRequest) -> bytes:
    """The canonical bytes of a request's first prompt: they grow at the end as a chat grows."""
    if request.kind is CHAT:
        pieces = [] if request.tools is None else [msgspec.json.encode(request.tools), b"\n"]
        for message in request.messages or ():
            content = message.get("content")
            text = content.encode() if isinstance(content, str) else _json(content)
            calls = message.get("tool_calls")
            pieces += (str(message["role"]).encode(), b"\n", text)
            pieces += (_json(calls), b"\n") if calls else (b"\n",)
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
