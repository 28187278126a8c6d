"""Whole answers on the routes that are passed on: whether they are answers at all. Pure.

What clients of these routes read is JSON, so HTML, half an answer or nothing is as broken there as
in a chat. Of routes that only workers know nothing is asked.
"""

from __future__ import annotations

import msgspec

from gateway import refusals
from gateway.relayedbodies import JSON_ROUTES
from gateway.stored import STORED
from shared import dialogue
from shared.openai import Usage

_LISTS_TOO = frozenset({"/v1/rerank", "/v1/score", "/tokenize", "/detokenize"})
"""Some engines answer with a bare list there."""
_PAGES = frozenset({"text/html", "text/plain"})
_skim = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def expected(route: str, content_type: str) -> bool:
    """Whether an answer of this type has to be JSON. Other types are a worker's own business:
    embeddings can be asked for as bytes."""
    if route in STORED:  # they may be streamed again, and one that is gone needs no words
        return content_type.endswith("json") or content_type in _PAGES
    if route not in JSON_ROUTES:
        return False
    return not content_type or content_type.startswith("text/") or content_type.endswith("json")


def look(route: str, body: bytes) -> tuple[Usage | None, str]:
    """What a whole response or message took, and the id to go on from a response.

    Raises ``AttemptFailed`` for what is no answer, or where there is nothing but an error: a
    response may have failed, but it has an id then.
    """
    dialogues = route in dialogue.ROUTES
    if not dialogues and _is_usual(body):
        return None, ""
    decoded = refusals.decode_json(body)
    if not isinstance(decoded, dict):
        if isinstance(decoded, list) and route in _LISTS_TOO:
            return None, ""
        raise refusals.no_answer()
    error = refusals.error_in(decoded)
    named = (dialogues or route in STORED) and decoded.get("id") is not None
    if error is not None and not named:
        raise refusals.from_error_object(error)
    if not dialogues:  # what a stored response took was counted when it was made
        return None, ""
    given = dialogue.response_id(decoded) if route == dialogue.RESPONSES else ""
    return dialogue.read_usage(decoded.get("usage")), given


def _is_usual(body: bytes) -> bool:
    """An object without an error, of strict JSON: nothing of it need be decoded (vectors are
    long)."""
    try:
        if not body.isascii():
            body.decode()  # what is skipped is not looked at so closely
        return "error" not in _skim(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
