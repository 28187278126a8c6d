"""How much of a request there is to go through before it has keys, told from its shape. Pure."""

from __future__ import annotations

from typing import Any

from shared.openai import CHAT, GenerateRequest, prompts_of

MANY_ITEMS = 1000
"""Messages, parts, calls, tools or prompts: these take about 20 ms to render, cut and hash."""
LARGE_BODY = 1 << 20
"""Bytes; what is written into a text from so much JSON takes as long, however few items it has."""
_FEWEST_BYTES = 4 * MANY_ITEMS
"""No smaller body has so many items."""


def is_bulky(request: GenerateRequest) -> bool:
    """Whether rendering it and going through its pieces takes long, whatever is known of them."""
    size = len(request.raw)
    if size < _FEWEST_BYTES:
        return False
    return size > LARGE_BODY or _items(request) > MANY_ITEMS


def _items(request: GenerateRequest) -> int:
    if request.kind is CHAT:
        return len(request.tools or ()) + sum(map(_parts, request.messages or ()))
    return len(prompts_of(request))


def _parts(message: dict[str, Any]) -> int:
    content, calls = message.get("content"), message.get("tool_calls")
    return 1 + (len(content) if isinstance(content, list) else 0) + len(calls or ())
