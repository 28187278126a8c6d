"""A typed view of OpenAI generation requests, of usage and of error bodies. Pure.

``parse`` checks what routing needs and refuses what no engine can take; the range of a sampling
value stays the engine's business. An explicit null is the same as an absent field. The raw bytes
are kept and are what a worker gets; an edit is a splice (``shared.jsonsplice``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from shared.checks import CHECKS, USUAL, Prompt, check_messages, check_prompt, count, json_name
from shared.errors import ApiError, BadRequest
from shared.jsonsplice import Edit, apply, insert_first, members, set_member

_DECODER = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()


class RouteKind(StrEnum):
    """Which form a request has."""

    CHAT = "chat"
    COMPLETIONS = "completions"


CHAT = RouteKind.CHAT
"""For what every request passes: looking a member up in its class takes as long as a call."""


class GenerateRequest(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """One request as far as we look into it. Compared by identity."""

    kind: RouteKind
    model: str | None
    """None if missing, null or empty."""
    messages: list[dict[str, Any]] | None
    """Chat only: not empty, each with a string ``role``."""
    prompt: Prompt | None
    """Completions only; token ids are 0 <= id < 2**32."""
    stream: bool
    include_usage: bool
    """The client itself asked for the usage event of a stream."""
    max_tokens: int | None
    """``max_completion_tokens`` if given, else ``max_tokens``; its range is not checked here."""
    n: int
    """>= 1."""
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    """Whether the tokenizer adds its BOS and the like: True for completions, False for chat."""
    cache_salt: str | None
    session: str | None
    """``session_id``, else ``prompt_cache_key``. ``user`` names a person, not a session."""
    raw: bytes
    """The body as it came."""
    fields: dict[str, Any]
    """The decoded body, unknown fields included."""

    @property
    def several_prompts(self) -> bool:
        """Whether it is a list of prompts, not token ids of one."""
        prompt = self.prompt
        return type(prompt) is list and len(prompt) > 1 and type(prompt[0]) is not int

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are asked for. An engine computes all of such a
        prompt, whatever its cache holds, since a cache keeps no logits."""
        fields = self.fields
        if fields.get("prompt_logprobs") is not None:
            return True
        if self.kind is CHAT or fields.get("echo") is not True:
            return False
        logprobs = fields.get("logprobs")
        return logprobs is not None and logprobs is not False


_RARE = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "cache_salt",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "max_completion_tokens",
        "n",
        "prompt_cache_key",
        "session_id",
        "stream_options",
        "tools",
    }
)
"""Fields that few requests have, of those that are looked into."""


def parse(kind: RouteKind, body: bytes) -> GenerateRequest:
    """Read a request; raises :class:`BadRequest` with ``param`` set where one field is to blame."""
    fields = decode_object(body)
    for name, value in fields.items():
        types = USUAL.get(name)
        if types is not None and type(value) not in types and value is not None:
            CHECKS[name](name, value)
    chat = kind is CHAT
    messages = check_messages(fields.get("messages")) if chat else None
    if _RARE.isdisjoint(fields):
        return GenerateRequest(
            kind=kind,
            model=fields.get("model") or None,
            messages=messages,
            prompt=None if chat else check_prompt(fields.get("prompt")),
            stream=bool(fields.get("stream")),
            include_usage=False,
            max_tokens=fields.get("max_tokens"),
            n=1,
            tools=None,
            documents=None,
            chat_template_kwargs={},
            add_generation_prompt=True,
            continue_final_message=False,
            add_special_tokens=not chat,
            cache_salt=None,
            session=None,
            raw=body,
            fields=fields,
        )
    add_prompt, proceed = _ending(fields)
    options: dict[str, Any] = fields.get("stream_options") or {}
    limit = fields.get("max_completion_tokens")
    special = fields.get("add_special_tokens")
    return GenerateRequest(
        kind=kind,
        model=fields.get("model") or None,
        messages=messages,
        prompt=None if chat else check_prompt(fields.get("prompt")),
        stream=bool(fields.get("stream")),
        include_usage=bool(options.get("include_usage")),
        max_tokens=fields.get("max_tokens") if limit is None else limit,
        n=count(fields.get("n")),
        tools=fields.get("tools"),
        documents=fields.get("documents"),
        chat_template_kwargs=fields.get("chat_template_kwargs") or {},
        add_generation_prompt=add_prompt,
        continue_final_message=proceed,
        add_special_tokens=(not chat) if special is None else special,
        cache_salt=fields.get("cache_salt") or None,
        session=fields.get("session_id") or fields.get("prompt_cache_key") or None,
        raw=body,
        fields=fields,
    )


def prompts_of(request: GenerateRequest) -> list[str | list[int]]:
    """The prompts of a completions request, each a text or token ids."""
    prompt = request.prompt
    if prompt is None:
        raise BadRequest("'prompt' is required.", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def own_salt(request: GenerateRequest) -> str:
    """The ``cache_salt`` that stands in the body, whatever the request was scoped to since."""
    own: str | None = request.fields.get("cache_salt")
    return own or ""


def _ending(fields: dict[str, Any]) -> tuple[bool, bool]:
    """(add a generation prompt, continue the last message)."""
    proceed = bool(fields.get("continue_final_message"))
    add = fields.get("add_generation_prompt")
    if proceed and add:
        raise BadRequest(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            param="continue_final_message",
        )
    return (not proceed if add is None else add), proceed


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``; raises :class:`BadRequest` for anything else."""
    try:
        decoded = _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    if not isinstance(decoded, dict):
        raise BadRequest(f"The body must be a JSON object, not {json_name(decoded)}.")
    return decoded


# --- edits for workers, reading usage, errors ----------------------------------------------------


def usage_edits(raw: bytes) -> list[Edit]:
    """The splices that make ``stream_options.include_usage`` true in a request body."""
    edits: list[Edit] = []
    for member in members(raw):
        if member.key == "stream_options":
            if raw[member.start : member.start + 1] == b"{":
                edits += set_member(raw, "include_usage", b"true", member.start)
            else:
                edits.append(Edit(member.start, member.end, b'{"include_usage":true}'))
    return edits or set_member(raw, "stream_options", b'{"include_usage":true}')


def with_usage(raw: bytes) -> bytes:
    """``raw``, a body that passed :func:`parse`, asking for the usage event."""
    return apply(raw, usage_edits(raw))


def asking_usage(request: GenerateRequest, raw: bytes) -> bytes:
    """:func:`with_usage` of a request's body ``raw``, which may have been edited elsewhere."""
    if "stream_options" in request.fields:
        return with_usage(raw)
    # Not there, so it need not be looked for.
    return apply(raw, [insert_first(raw, "stream_options", b'{"include_usage":true}')])


def with_limit(request: GenerateRequest) -> bytes:
    """The body with the limit of the answer under its older name as well.

    Engines that know only ``max_tokens`` would go on to the end of their context.
    """
    limit = request.max_tokens
    if limit is None or limit == request.fields.get("max_tokens"):
        return request.raw
    return apply(request.raw, set_member(request.raw, "max_tokens", str(limit).encode()))


class Usage(msgspec.Struct, frozen=True):
    """What an engine counted, in tokens."""

    prompt: int
    completion: int
    cached: int | None = None
    """Prompt tokens that came from the cache; None = not reported (which is not 0)."""


MAX_TOKENS = 2**31 - 1
"""No engine counts beyond it: a larger number is a fault, and would spoil every sum it enters."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Details(msgspec.Struct):
    cached_tokens: _Count


class _Counted(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count
    prompt_tokens_details: _Details


class _Counting(msgspec.Struct):
    """As much of a whole answer as tells what it took, without what asks for a closer look."""

    usage: _Counted
    error: None = None


_decode_counting = msgspec.json.Decoder(_Counting).decode


def usual_usage(body: bytes) -> Usage | None:
    """As :func:`read_usage` of an answer that is a JSON object without an error and tells all that
    is counted, as nearly all do; None: that takes a closer look. Decodes nothing else."""
    try:
        if not body.isascii():
            body.decode()  # what is skipped below is not looked at so closely
        counted = _decode_counting(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    prompt, cached = counted.prompt_tokens, counted.prompt_tokens_details.cached_tokens
    return Usage(prompt, counted.completion_tokens, cached) if cached <= prompt else None


def _tokens(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def read_usage(obj: object) -> Usage | None:
    """Usage of a decoded answer or stream chunk; None if it carries none."""
    usage = obj.get("usage") if isinstance(obj, dict) else None
    if not isinstance(usage, dict):
        return None
    prompt = _tokens(usage.get("prompt_tokens"))
    completion = _tokens(usage.get("completion_tokens"))
    if prompt is None:
        return None
    details = usage.get("prompt_tokens_details")
    cached = _tokens(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is not None and cached > prompt:
        cached = None  # nonsense, so it is not known
    return Usage(prompt, completion or 0, cached)


def usage_body(usage: Usage) -> dict[str, Any]:
    """The ``usage`` object of an answer."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
    if usage.cached is not None:
        body["prompt_tokens_details"] = {"cached_tokens": usage.cached}
    return body


def error_body(error: ApiError) -> bytes:
    """The JSON body of an error, also what goes into an SSE ``data`` field."""
    return _ENCODER.encode(error.body())
