"""What the examples share: ask in a stream, note the first token's time and what was cached."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI


@dataclass
class Meter:
    """A client of one gateway that keeps the books of its requests."""

    url: str = "http://127.0.0.1:8000"
    prompt: int = 0
    cached: int = 0
    first_tokens: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="unused")
        self.model = next(iter(self.client.models.list())).id

    def ask(self, what: str, messages: list[Any], **options: Any) -> Any:
        """The assistant's whole message (a dict, tool calls included); prints a line about it."""
        begun = time.monotonic()
        first: float | None = None
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: dict[int, dict[str, Any]] = {}
        raw = self.client.chat.completions.with_raw_response.create(
            model=self.model,
            messages=messages,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
        usage: Any = None
        for chunk in raw.parse():
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.delta.content or choice.delta.tool_calls or choice.finish_reason:
                    first = first or time.monotonic() - begun
                message["content"] += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                    call["id"] += part.id or ""
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
        if calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls.values()
            ]
        if first is None or usage is None:
            raise RuntimeError("the stream ended before the answer had begun")
        self._note(what, raw.headers["x-headwater-worker"], usage, first)
        return message

    def _note(self, what: str, worker: str, usage: Any, first: float) -> None:
        cached = usage.prompt_tokens_details.cached_tokens
        self.prompt += usage.prompt_tokens
        self.cached += cached
        self.first_tokens.append(first)
        print(
            f"{what:<28} {worker}  {usage.prompt_tokens:>5} prompt tokens, {cached:>5} cached, "
            f"first token after {first * 1000:>6.0f} ms"
        )

    def summary(self) -> None:
        """The two figures that prefix-aware routing is about."""
        rest = self.first_tokens[1:]
        print(
            f"hit rate {self.cached / self.prompt:.1%}; first token after "
            f"{self.first_tokens[0] * 1000:.0f} ms in the first request, "
            f"{sum(rest) / len(rest) * 1000:.0f} ms on average in the others"
        )


def from_command_line() -> Meter:
    """A meter for the gateway that the command line names, or the one that ``make up`` starts."""
    return Meter(*sys.argv[1:2])
