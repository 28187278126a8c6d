"""Prompts of OpenAI's Responses and Anthropic's Messages, as far as routing looks into them.

Engines render these requests in ways of their own, so no tokens are made of them: their text is
hashed in blocks, as where there is no tokenizer (``shared.textchain``). It begins with what engines
put first and grows at the end as a conversation grows. What clients change in old turns without
changing what is said is left out. Nothing here refuses a request: that is the engine's part. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from shared import laxjson
from shared.openai import MAX_TOKENS, Usage

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ROUTES = frozenset({RESPONSES, MESSAGES})

_TEXTS = frozenset({"text", "input_text", "output_text"})
_UNSAID = frozenset({"annotations", "cache_control", "id", "logprobs", "status"})
"""Fields of items and parts that no template sees, or that change from turn to turn."""
_MAX_NAME = 256


class Dialogue(msgspec.Struct, frozen=True):
    """What a request says that matters for where it goes."""

    text: bytes
    """Its prompt; empty if it cannot be made out."""
    max_tokens: int = 0
    """Of the answer; 0 = not said."""
    salt: str = ""
    """The client's own ``cache_salt``."""
    session: str = ""
    previous: str = ""
    """Id of the response it goes on from, whose prompt only its worker knows."""
    stream: bool = False
    """Its answer is to come as events. Engines take 1 and "true" for true."""


NOTHING = Dialogue(b"", stream=True)
"""What cannot be read may ask for anything."""


def read(route: str, body: bytes) -> Dialogue:
    """A request's body on one of :data:`ROUTES`."""
    try:
        fields = laxjson.decode(body)
        if not isinstance(fields, dict):
            return NOTHING
        responses = route == RESPONSES
        limit = fields.get("max_output_tokens" if responses else "max_tokens")
        return Dialogue(
            text=b"".join(_prompt(fields, responses)),
            max_tokens=limit if type(limit) is int and 0 < limit <= MAX_TOKENS else 0,
            salt=_name(fields, "cache_salt"),
            session=_name(fields, "prompt_cache_key")[:_MAX_NAME],
            previous=_name(fields, "previous_response_id")[:_MAX_NAME] if responses else "",
            stream=bool(fields.get("stream")),
        )
    except (laxjson.NotJson, RecursionError):
        return NOTHING


def _name(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    # Half a surrogate pair is no name of anything.
    if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
        return ""
    return value


def _prompt(fields: dict[str, Any], responses: bool) -> Iterable[bytes]:
    """Pieces of text, in the order in which engines render them."""
    if fields.get("tools"):
        yield _json(fields["tools"])
        yield b"\n"
    system, turns = ("instructions", "input") if responses else ("system", "messages")
    if fields.get(system):
        yield from _turn("system", fields[system])
    said = fields.get(turns)
    if isinstance(said, str):
        yield from _turn("user", said)
    elif isinstance(said, list):
        for item in said:
            if isinstance(item, dict) and "content" in item:
                yield from _turn(str(item.get("role")), item["content"])
            else:
                yield _json(item)
                yield b"\n"


def _turn(role: str, content: object) -> Iterable[bytes]:
    yield role.encode("utf-8", "surrogatepass")
    yield b"\n"
    for part in content if isinstance(content, list) else (content,):
        text = part
        if isinstance(part, dict) and str(part.get("type")) in _TEXTS:
            text = part.get("text")
        yield text.encode("utf-8", "surrogatepass") if isinstance(text, str) else _json(text)
    yield b"\n"


def _json(value: object) -> bytes:
    return laxjson.encode(_said(value))


def _said(value: object) -> object:
    """A JSON value without what is not said in it."""
    if isinstance(value, dict):
        return {name: _said(inner) for name, inner in value.items() if name not in _UNSAID}
    if isinstance(value, list):
        return [_said(inner) for inner in value]
    return value


# --- answers -------------------------------------------------------------------------------------


def read_usage(usage: object) -> Usage | None:
    """A ``usage`` object of either form; None if it counts no prompt.

    Anthropic's ``input_tokens`` leaves out what was read from the cache, or written to it.
    """
    if not isinstance(usage, dict) or (prompt := _count(usage, "input_tokens")) is None:
        return None
    details = usage.get("input_tokens_details")
    if isinstance(details, dict):
        cached = _count(details, "cached_tokens")
    else:
        cached = _count(usage, "cache_read_input_tokens")
        prompt += (cached or 0) + (_count(usage, "cache_creation_input_tokens") or 0)
    if prompt > MAX_TOKENS or (cached or 0) > prompt:
        return None
    return Usage(prompt, _count(usage, "output_tokens") or 0, cached)


def _count(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def response_id(value: object) -> str:
    """The id by which another request can go on from a response, whole or as events hold it."""
    return _name(value, "id")[:_MAX_NAME] if isinstance(value, dict) else ""
