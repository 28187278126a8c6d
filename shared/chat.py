"""From a chat request to its text: messages in the form templates expect, then the template.

Messages are prepared as vLLM prepares them (content as text or as parts, missing content is empty,
tool arguments as objects) and otherwise as transformers does (nulls dropped, reasoning aliases,
``continue_final_message``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
import msgspec

from shared.errors import BadRequest
from shared.openai import GenerateRequest
from shared.template import ChatTemplate

_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Kinds of parts that are text, and the field that holds it."""


class UnsupportedContent(BadRequest):
    """400: a part of a message (an image, say) that a text tokenizer cannot render."""


def render(template: ChatTemplate, request: GenerateRequest, special: Mapping[str, str]) -> str:
    """The prompt's text.

    :param special: special tokens by the names templates use; ``chat_template_kwargs`` win.
    :raises BadRequest: the messages do not fit the template, by its own word or by failing in it.
    """
    messages = conversation(request, as_parts=template.takes_parts)
    if request.continue_final_message:
        last = _tag_last(messages, template)
    variables = {
        **special,
        "tools": request.tools,
        "documents": request.documents,
        "add_generation_prompt": request.add_generation_prompt,
        **_effort(request),
        **request.chat_template_kwargs,
        "messages": messages,
    }
    try:
        text = template.render(variables)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise BadRequest(
            f"The model's chat template cannot render these messages: {error}", param="messages"
        ) from None
    except (RecursionError, OverflowError, ZeroDivisionError, IndexError) as error:
        raise BadRequest(
            f"The model's chat template failed: {type(error).__name__}", param="messages"
        ) from None
    return _cut_at_tag(text, last) if request.continue_final_message else text


def _effort(request: GenerateRequest) -> dict[str, str]:
    effort = request.fields.get("reasoning_effort")
    return {"reasoning_effort": effort} if isinstance(effort, str) else {}


def conversation(request: GenerateRequest, *, as_parts: bool) -> list[dict[str, Any]]:
    """The messages as a template gets them; ``as_parts``: content is a list of text parts."""
    prepared = []
    for index, message in enumerate(request.messages or ()):
        where = f"messages[{index}]"
        made = {key: value for key, value in message.items() if value is not None}
        parts = _text_parts(where, message.get("content"))
        if as_parts:
            made["content"] = [{"type": "text", "text": text} for text in parts]
        else:
            made["content"] = "\n".join(parts)
        if "tool_calls" in made:
            _read_arguments(where, made)
        prepared.append(_with_reasoning(made))
    return prepared


def _text_parts(where: str, content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content)]


def _part_text(where: str, part: str | dict[str, Any]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text")
    field = _TEXT_FIELDS.get(kind)
    if field is None:
        raise UnsupportedContent(f"This model takes text only, not '{kind}'.", param=where)
    text = part.get(field)
    if not isinstance(text, str):
        raise BadRequest(f"'{where}.{field}' must be a string.", param=where)
    return text


def _read_arguments(where: str, message: dict[str, Any]) -> None:
    """Tool calls with their arguments as objects; an empty list of calls is dropped."""
    calls = message["tool_calls"]
    if not calls:
        del message["tool_calls"]
        return
    prepared = []
    for index, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict):
            raise BadRequest(
                f"'{where}.tool_calls[{index}].function' must be an object.", param=where
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _decode_arguments(f"{where}.tool_calls[{index}]", arguments)
        prepared.append({**call, "function": {**function, "arguments": arguments or {}}})
    message["tool_calls"] = prepared


def _decode_arguments(where: str, text: str) -> Any:
    if not text.strip():
        return {}
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(f"'{where}.function.arguments' is not valid JSON.", param=where) from None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under each name that templates read it by."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


# --- continuing the last message -----------------------------------------------------------------


def _tag_last(messages: list[dict[str, Any]], template: ChatTemplate) -> str:
    """Mark the end of the last message's text; returns the text before the mark."""
    content = messages[-1]["content"]
    if "content" not in template.source:
        raise _cannot_continue("the template shows no content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_TAG
        return content
    if not content:
        raise _cannot_continue("the last message has no text")
    text = str(content[-1]["text"])
    content[-1]["text"] = text + _CONTINUE_TAG
    return text


def _cut_at_tag(text: str, last: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if last.strip() not in text or tag not in text:
        raise _cannot_continue("the template changes or drops it")
    at = text.rindex(tag)
    kept = text[:at]
    # a template that trims the message has trimmed the space at the tag's end
    return kept if text.startswith(_CONTINUE_TAG, at) else kept.rstrip()


def _cannot_continue(reason: str) -> BadRequest:
    return BadRequest(
        f"The last message cannot be continued: {reason}.", param="continue_final_message"
    )
