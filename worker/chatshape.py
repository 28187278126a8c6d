"""``/v1/chat/completions``: text, log-probabilities and tool calls as OpenAI shapes them. P."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.generation import Delta
from worker.logprobshape import Json, LogprobForm
from worker.responses import JUST_THE_ANSWER, Answer, Head, Shown
from worker.sequence import FinishReason
from worker.tokentext import TokenText
from worker.toolformat import ToolFormat
from worker.toolread import Arguments, Opened, Part, ToolReader, gather

TOOL_CALLS = "tool_calls"
"""Finish reason of an answer that holds calls."""


@dataclass(frozen=True, slots=True)
class CallReading:
    """How calls are found in an answer."""

    format: ToolFormat
    names: frozenset[str]
    """Functions that may be called."""

    def reader(self) -> ToolReader:
        """A reader for one answer."""
        return ToolReader(self.format, self.names)


class ChatShape:
    """Chunks and bodies of one chat request.

    :param calls: None if the answers' text is content, whatever it looks like.
    """

    _CHUNK = "chat.completion.chunk"

    def __init__(
        self,
        head: Head,
        tokens: TokenText,
        calls: CallReading | None = None,
        shown: Shown = JUST_THE_ANSWER,
    ) -> None:
        self._head, self._calls, self._shown = head, calls, shown
        self._form = LogprobForm(tokens, as_ids=shown.as_ids)
        self._readers: dict[int, ToolReader] = {}
        self._called: dict[int, int] = {}
        """Calls streamed so far, by choice."""

    def opening(self, index: int, delta: Delta) -> list[Json]:
        """The role."""
        chunk = self._chunk(index, {"role": "assistant", "content": ""}, None, None)
        if self._shown.token_ids:
            chunk["prompt_token_ids"] = list(self._shown.prompt(0))
        return [chunk]

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Text, calls, and on its own the finish reason."""
        chunks = []
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._form.chat(list(zip(delta.token_ids, delta.logprobs, strict=True)))
        parts = self._parts(index, delta)
        unseen = delta.logprobs or (self._shown.token_ids and delta.token_ids)
        if unseen and not any(isinstance(part, str) for part in parts):
            parts = ["", *parts]
        for part in parts:
            if isinstance(part, str):
                chunks.append(self._chunk(index, {"content": part}, logprobs, None))
                logprobs = None
            else:
                piece = self._piece(index, part)
                chunks.append(self._chunk(index, {"tool_calls": [piece]}, None, None))
        if delta.finish is not None:
            finish = _finish(delta.finish, self._called.get(index, 0))
            chunks.append(self._chunk(index, {}, None, finish))
        if self._shown.token_ids and chunks:
            # those of all that the delta shows, once
            chunks[0]["choices"][0]["token_ids"] = list(delta.token_ids)
        return chunks

    def closing(self, answers: Sequence[Answer]) -> list[Json]:
        """Usage, if wanted."""
        return self._head.usage_chunks(self._CHUNK, answers)

    def whole(self, answers: Sequence[Answer]) -> Json:
        """The ``chat.completion`` object."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        body = self._head.body("chat.completion", choices, answers)
        scores, n = answers[0].prompt_logprobs, self._shown.prompt_logprobs
        if scores is not None and n is not None:
            body["prompt_logprobs"] = self._form.prompt(self._shown.prompt(0), scores, n)
        if self._shown.token_ids:
            body["prompt_token_ids"] = list(self._shown.prompt(0))
        return body

    def _choice(self, index: int, answer: Answer) -> Json:
        text = "".join(answer.texts)
        parts: list[Part] = [text]
        if self._calls is not None:
            reader = self._calls.reader()
            parts = [*reader.push(text), *reader.finish()]
        content, calls = gather(parts)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [
                self._call(index, number, call.name, call.arguments)
                for number, call in enumerate(calls)
            ]
        ids = {"token_ids": answer.token_ids} if self._shown.token_ids else {}
        return {
            **ids,
            "index": index,
            "message": message,
            "logprobs": self._form.chat(answer.entries) if answer.entries else None,
            "finish_reason": _finish(answer.finish, len(calls)),
        }

    def _parts(self, index: int, delta: Delta) -> list[Part]:
        if self._calls is None:
            return [delta.text] if delta.text else []
        reader = self._readers.setdefault(index, self._calls.reader())
        parts = reader.push(delta.text)
        return parts if delta.finish is None else [*parts, *reader.finish()]

    def _piece(self, index: int, part: Opened | Arguments) -> Json:
        """Id and name of a call, or the next piece of its arguments."""
        number = self._called.get(index, 0)
        if isinstance(part, Opened):
            self._called[index] = number + 1
            return {"index": number, **self._call(index, number, part.name, "")}
        return {"index": number - 1, "function": {"arguments": part.text}}

    def _call(self, index: int, number: int, name: str, arguments: str) -> Json:
        if self._calls is None:
            raise AssertionError("a call in an answer that has none")
        return {
            "id": self._calls.format.call_id(self._head.id, index, number),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._head.chunk(self._CHUNK, [choice])


def _finish(finish: FinishReason | None, calls: int) -> str | None:
    """An answer cut off at its limit is no finished set of calls."""
    return TOOL_CALLS if calls and finish is FinishReason.STOP else finish
