"""Schemas of what clients send. What the gateway checks is here; further fields reach the worker.

Held against ``shared.checks`` by a test: a body that the parser refuses for its types is refused
here, and the other way round.
"""

from __future__ import annotations

from gateway.openapi.schemas import (
    FLAG,
    NUMBER,
    OBJECT,
    TEXT,
    WHOLE,
    Schema,
    listed,
    maybe,
    obj,
    ref,
    said,
)
from shared.checks import MAX_TOKEN_ID

_TOKENS: Schema = {
    **listed({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}),
    "minItems": 1,
}

SHARED: dict[str, Schema] = {
    "model": said(maybe(TEXT), "As listed in `/v1/models`; an adapter's name, too."),
    "stream": maybe(FLAG),
    "stream_options": maybe(obj({"include_usage": maybe(FLAG)}, required=())),
    "max_tokens": said(maybe(WHOLE), "Below 1 is refused by workers."),
    "max_completion_tokens": said(maybe(WHOLE), "Wins over `max_tokens`."),
    "n": said(maybe({**WHOLE, "minimum": 1}), "How many answers."),
    "seed": maybe(WHOLE),
    "top_k": maybe(WHOLE),
    "min_tokens": maybe(WHOLE),
    "temperature": maybe(NUMBER),
    "top_p": maybe(NUMBER),
    "min_p": maybe(NUMBER),
    "presence_penalty": maybe(NUMBER),
    "frequency_penalty": maybe(NUMBER),
    "repetition_penalty": maybe(NUMBER),
    "stop": {"anyOf": [TEXT, listed(TEXT), {"type": "null"}]},
    "response_format": maybe(OBJECT),
    "ignore_eos": maybe(FLAG),
    "add_special_tokens": maybe(FLAG),
    "cache_salt": said(
        maybe(TEXT), "Only prompts with the same salt share cached blocks; can only narrow a scope."
    ),
    "session_id": said(maybe(TEXT), "As the header `x-headwater-session`."),
    "prompt_cache_key": said(maybe(TEXT), "As `session_id`, which wins."),
    "user": maybe(TEXT),
    "top_logprobs": maybe(WHOLE),
    "tools": maybe(listed(OBJECT)),
    "documents": maybe(listed(OBJECT)),
    "chat_template_kwargs": maybe(OBJECT),
    "add_generation_prompt": maybe(FLAG),
    "continue_final_message": said(maybe(FLAG), "Excludes `add_generation_prompt`."),
    "echo": maybe(FLAG),
}
"""Fields of both routes that have one meaning everywhere. A null is the same as an absence."""

_CLOSED = {
    "not": {
        "properties": {
            "continue_final_message": {"const": True},
            "add_generation_prompt": {"const": True},
        },
        "required": ["continue_final_message", "add_generation_prompt"],
    }
}

_PART: Schema = {
    "anyOf": [
        TEXT,
        {
            **obj({"type": {"type": "string", "default": "text"}, "text": {}}, required=()),
            "if": {"properties": {"type": {"const": "text"}}},
            "then": {"properties": {"text": TEXT}, "required": ["text"]},
        },
    ]
}

_MESSAGE = obj(
    {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [TEXT, listed(_PART), {"type": "null"}]},
        "tool_calls": maybe(listed(OBJECT)),
    },
    required=("role",),
)

REQUESTS: dict[str, Schema] = {
    "ChatRequest": {
        **obj(
            {"messages": {**listed(ref("Message")), "minItems": 1}, **SHARED},
            required=("messages",),
        ),
        **_CLOSED,
        "description": "A chat completion. Fields that are not listed reach the worker as they "
        "are; what `headwater worker` knows is in docs/sampling.md.",
    },
    "CompletionRequest": {
        **obj({"prompt": ref("Prompt"), **SHARED}, required=("prompt",)),
        **_CLOSED,
        "description": "A text completion. Further fields reach the worker as they are.",
    },
    "Message": _MESSAGE,
    "Prompt": {
        "description": "Text, token ids, or a list of either.",
        "anyOf": [
            TEXT,
            {**listed(TEXT), "minItems": 1},
            _TOKENS,
            {**listed(_TOKENS), "minItems": 1},
        ],
    },
    "Relayed": {
        "properties": {
            "model": said(maybe(TEXT), "May be left out while there is only one."),
        },
        "description": "Whatever the worker takes.",
    },
}
