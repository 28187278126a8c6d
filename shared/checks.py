"""Checks of single request fields: the JSON types routing and every engine rely on. Pure.

Each raises :class:`BadRequest` that names the field. Ranges of sampling values are the engine's
business. A boolean is never taken for a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import BadRequest

MAX_TOKEN_ID = 2**32 - 1

Prompt = str | list[int] | list[str] | list[list[int]]


def json_name(value: object) -> str:
    """JSON name of a value's type, for messages."""
    names: dict[type, str] = {
        bool: "a boolean", int: "an integer", float: "a number", str: "a string",
        list: "an array", dict: "an object", type(None): "null",
    }  # fmt: skip
    return names.get(type(value), "something else")


def _wrong(param: str, wanted: str, value: object) -> BadRequest:
    return BadRequest(f"'{param}' must be {wanted}, not {json_name(value)}.", param=param)


def _is(wanted: str, *types: type) -> Callable[[str, object], None]:
    """A check by exact JSON type (a boolean is no integer)."""

    def check(param: str, value: object) -> None:
        if type(value) not in types:
            raise _wrong(param, wanted, value)

    check.types = types  # type: ignore[attr-defined]
    return check


def _objects(param: str, value: object) -> None:
    if not isinstance(value, list):
        raise _wrong(param, "an array of objects", value)
    for item in value:
        if not isinstance(item, dict):
            raise _wrong(param, "an array of objects", item)


def _stop(param: str, value: object) -> None:
    if isinstance(value, str):
        return
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong(param, "a string or an array of strings", value)


def _stream_options(param: str, value: object) -> None:
    if not isinstance(value, dict):
        raise _wrong(param, "an object", value)
    wanted = value.get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        raise _wrong(f"{param}.include_usage", "a boolean", wanted)


_TEXT = _is("a string", str)
_FLAG = _is("a boolean", bool)
_WHOLE = _is("an integer", int)
_NUMBER = _is("a number", int, float)
_OBJECT = _is("an object", dict)

CHECKS: Mapping[str, Callable[[str, object], None]] = {  # by field; called when it is not null
    "model": _TEXT,
    "stream": _FLAG,
    "stream_options": _stream_options,
    "max_tokens": _WHOLE,
    "max_completion_tokens": _WHOLE,
    "n": _WHOLE,
    "seed": _WHOLE,
    "top_k": _WHOLE,
    "top_logprobs": _WHOLE,
    "min_tokens": _WHOLE,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "stop": _stop,
    "tools": _objects,
    "documents": _objects,
    "chat_template_kwargs": _OBJECT,
    "response_format": _OBJECT,
    "add_generation_prompt": _FLAG,
    "continue_final_message": _FLAG,
    "add_special_tokens": _FLAG,
    "ignore_eos": _FLAG,
    "echo": _FLAG,
    "cache_salt": _TEXT,
    "session_id": _TEXT,
    "prompt_cache_key": _TEXT,
    "user": _TEXT,
}


USUAL: Mapping[str, tuple[type, ...]] = {
    name: getattr(check, "types", ()) for name, check in CHECKS.items()
}
"""By field that has a check: values of exactly these types pass it."""


def count(value: int | None) -> int:
    """``n``, the number of answers."""
    if value is None:
        return 1
    if value < 1:
        raise BadRequest(f"'n' must be at least 1, not {value}.", param="n")
    return value


# --- messages and prompts ----------------------------------------------------------------------


def check_messages(value: object) -> list[dict[str, Any]]:
    """A non-empty list of messages with a role each; content is text, parts or nothing."""
    if value is None:
        raise BadRequest("'messages' is required.", param="messages")
    if not isinstance(value, list):
        raise _wrong("messages", "an array of objects", value)
    if not value:
        raise BadRequest("'messages' must not be empty.", param="messages")
    for index, message in enumerate(value):
        if not _is_usual(message):
            _message(f"messages[{index}]", message)
    return value


def _is_usual(message: object) -> bool:
    """A role and a text, nothing else: as nearly all are."""
    if type(message) is not dict or len(message) != 2:
        return False
    role = message.get("role")
    return type(role) is str and bool(role) and type(message.get("content")) is str


def _message(where: str, message: object) -> None:
    if not isinstance(message, dict):
        raise _wrong(where, "an object", message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"'{where}.role' must be a non-empty string.", param=f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _part(f"{where}.content[{index}]", part)
    elif content is not None and not isinstance(content, str):
        raise _wrong(f"{where}.content", "a string, an array of parts or null", content)
    calls = message.get("tool_calls")
    if calls is not None:
        _objects(f"{where}.tool_calls", calls)


def _part(where: str, part: object) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise _wrong(where, "an object", part)
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise _wrong(f"{where}.type", "a string", kind)
    if kind == "text" and not isinstance(part.get("text"), str):
        raise _wrong(f"{where}.text", "a string", part.get("text"))


def check_prompt(value: object) -> Prompt:
    """Text, token ids, or a list of either."""
    if isinstance(value, str):
        return value
    if value is None:
        raise BadRequest("'prompt' is required.", param="prompt")
    if not isinstance(value, list):
        raise _wrong("prompt", "a string, token ids, or an array of either", value)
    if not value:
        raise BadRequest("'prompt' must not be empty.", param="prompt")
    kinds = set(map(type, value))
    if kinds == {str}:
        return value
    if kinds == {list}:
        for index, tokens in enumerate(value):
            _token_ids(f"prompt[{index}]", tokens)
        return value
    _token_ids("prompt", value)
    return value


def _token_ids(where: str, tokens: list[Any]) -> None:
    if not tokens:
        raise BadRequest(f"'{where}' must not be empty.", param="prompt")
    if set(map(type, tokens)) != {int}:
        raise BadRequest(f"'{where}' must hold token ids (integers) only.", param="prompt")
    if min(tokens) < 0 or max(tokens) > MAX_TOKEN_ID:
        raise BadRequest(f"'{where}' holds a token id out of range.", param="prompt")
