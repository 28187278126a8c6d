"""How each engine is asked for the tokens of a prompt, without I/O.

A conversation is a generator: it yields requests, is sent their replies, and returns the answer.

    headwater, vllm   POST /tokenize with `messages` or `prompt`
    sglang            the same; where chats are not taken there, their length from a completion
    llama.cpp         POST /apply-template, then POST /tokenize with `content`
    tgi               POST /tokenize with `inputs`, POST /chat_tokenize
    any other         the first form, and llama.cpp's if that is what answers
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.parity import Answer, Kind, Probe

REASON_LIMIT = 200


@dataclass(frozen=True, slots=True)
class Ask:
    """One POST with a JSON body."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    """0: nothing."""
    body: bytes = b""
    reason: str = ""
    """Why nothing came back."""


Conversation = Generator[Ask, Reply, Answer]

_TEXT = {"add_special": True, "parse_special": True}
"""As llama.cpp's completions treat a prompt."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _TgiToken(msgspec.Struct):
    id: int


class _TgiChat(msgspec.Struct):
    tokenize_response: list[_TgiToken]


class _Rendered(msgspec.Struct):
    prompt: str


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Completion(msgspec.Struct):
    usage: _Usage


def conversation(engine: str, model: str, probe: Probe) -> Conversation:
    """Ask an engine what it makes of a probe prompt."""
    if engine == "llamacpp":
        return _llamacpp(probe)
    if engine == "tgi":
        return _tgi(probe)
    if engine == "sglang":
        return _sglang(model, probe)
    return _vllm(model, probe)


def _vllm(model: str, probe: Probe) -> Conversation:
    reply = yield Ask("/tokenize", {"model": model, **probe.fields})
    answer = _read_tokens(reply)
    if answer.tokens is not None and not answer.tokens:
        # llama.cpp's server reads `content`, and finds none
        return (yield from _llamacpp(probe))
    return answer


def _sglang(model: str, probe: Probe) -> Conversation:
    answer = _read_tokens((yield Ask("/tokenize", {"model": model, **probe.fields})))
    if probe.kind is Kind.TEXT or answer.tokens:
        return answer
    if "tools" in probe.fields:
        return Answer(missing="/tokenize takes no chats")
    body = {"model": model, **probe.fields, "max_tokens": 1, "temperature": 0}
    reply = yield Ask("/v1/chat/completions", body)
    refusal = _refusal(reply, "/v1/chat/completions")
    if refusal is not None:
        return refusal
    try:
        completion = msgspec.json.decode(reply.body, type=_Completion)
    except (msgspec.DecodeError, RecursionError):
        return Answer(missing="the completion tells no usage")
    return Answer(count=completion.usage.prompt_tokens)


def _llamacpp(probe: Probe) -> Conversation:
    text = probe.fields.get("prompt")
    if probe.kind is Kind.CHAT:
        reply = yield Ask("/apply-template", dict(probe.fields))
        refusal = _refusal(reply, "/apply-template")
        if refusal is not None:
            return refusal
        try:
            text = msgspec.json.decode(reply.body, type=_Rendered).prompt
        except (msgspec.DecodeError, RecursionError) as error:
            return Answer(missing=_short(f"/apply-template cannot be read: {error}"))
    return _read_tokens((yield Ask("/tokenize", {"content": text, **_TEXT})))


def _tgi(probe: Probe) -> Conversation:
    chat = probe.kind is Kind.CHAT
    path = "/chat_tokenize" if chat else "/tokenize"
    body = {"model": "tgi", **probe.fields} if chat else {"inputs": probe.fields["prompt"]}
    reply = yield Ask(path, body)
    refusal = _refusal(reply, path)
    if refusal is not None:
        return refusal
    try:
        if chat:
            listed = msgspec.json.decode(reply.body, type=_TgiChat).tokenize_response
        else:
            listed = msgspec.json.decode(reply.body, type=list[_TgiToken])
    except (msgspec.DecodeError, RecursionError) as error:
        return Answer(missing=_short(f"{path} cannot be read: {error}"))
    return Answer([token.id for token in listed])


def _read_tokens(reply: Reply) -> Answer:
    refusal = _refusal(reply, "/tokenize")
    if refusal is not None:
        return refusal
    try:
        return Answer(msgspec.json.decode(reply.body, type=_Tokens).tokens)
    except (msgspec.DecodeError, RecursionError) as error:
        return Answer(missing=_short(f"/tokenize cannot be read: {error}"))


def _refusal(reply: Reply, path: str) -> Answer | None:
    """What a reply without tokens means; None for one that should hold some."""
    status = reply.status
    if 200 <= status < 300:
        return None
    if status == 0:
        return Answer(missing=reply.reason or "no answer")
    if status in (401, 403):
        return Answer(missing=f"{path} answered {status}: workers.api_key is not the worker's key")
    if status in (404, 405, 501):
        return Answer(missing=f"there is no {path} route (status {status})")
    words = message(reply.body)
    if status in (400, 422) or (status == 500 and path == "/apply-template"):
        return Answer(refused=_short(words or f"status {status}"))
    return Answer(missing=_short(f"{path} answered {status} {words}".rstrip()))


def message(body: bytes) -> str:
    """What an error body says: OpenAI's form, FastAPI's, or TGI's; empty if it says nothing."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    for name in ("error", "message", "detail"):
        while isinstance(value, dict) and name in value:
            value = value[name]
    return _short(value) if isinstance(value, str) else ""


def _short(text: str) -> str:
    return " ".join(text.split())[:REASON_LIMIT]
