"""A small HTTP client for tests of worker processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from stopwatch import Limit

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """A greedy chat request."""
    messages = [{"role": "user", "content": text}]
    return {"model": "fake", "messages": messages, "temperature": 0, **fields}


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    """A greedy completions request."""
    return {"model": "fake", "prompt": prompt, "temperature": 0, **fields}


@dataclass
class Stream:
    """A stream that was read to its end."""

    status: int
    headers: httpx.Headers
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    """How many ``[DONE]`` were seen."""

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """All choice objects of one index, in order."""
        return [c for chunk in self.chunks for c in chunk.get("choices", []) if c["index"] == index]

    def text(self, index: int = 0) -> str:
        """The joined text of one choice, of either form."""
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
            for choice in self.choices(index)
        )

    def finishes(self, index: int = 0) -> list[str]:
        """All finish reasons of one choice that are not null."""
        return [c["finish_reason"] for c in self.choices(index) if c["finish_reason"] is not None]

    @property
    def usages(self) -> list[dict[str, Any]]:
        """All usage objects that are not null."""
        return [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """All error events."""
        return [chunk["error"] for chunk in self.chunks if "error" in chunk]


def parse_events(body: str) -> tuple[list[dict[str, Any]], int]:
    """JSON events of a whole stream, and the number of ``[DONE]``, which must come last."""
    events = [event for event in body.split("\n\n") if event]
    assert all(event.startswith("data: ") for event in events)
    data = [event.removeprefix("data: ") for event in events]
    done = data.count("[DONE]")
    assert not done or data[-1] == "[DONE]"
    return [json.loads(item) for item in data if item != "[DONE]"], done


class Client:
    """Requests to one worker; every call raises for nothing."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """POST JSON."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(path, json=body, headers=sent)

    async def ask(self, path: str, body: Any) -> dict[str, Any]:
        """The JSON answer of a request that must succeed."""
        answer = await self.post(path, body)
        assert answer.status_code == 200, answer.text
        decoded: dict[str, Any] = answer.json()
        return decoded

    async def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """The events of a stream, read to the end."""
        answer = await self.post(path, {**body, "stream": True})
        result = Stream(answer.status_code, answer.headers)
        if answer.status_code == 200:
            assert answer.headers["content-type"].startswith("text/event-stream")
            result.chunks, result.done = parse_events(answer.text)
        return result

    async def load(self) -> dict[str, Any]:
        """``/headwater/load``."""
        load: dict[str, Any] = (await self.http.get("/headwater/load")).json()
        return load


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object of a JSON error, whose shape is checked."""
    assert answer.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert "Traceback" not in answer.text
    return error


async def until(check: Callable[[], Awaitable[Any]], timeout_s: float = 20.0) -> None:
    """Return once ``check`` is true."""
    limit = Limit(timeout_s)
    while not await check():
        assert not limit.over(), "it did not happen in time"
        await asyncio.sleep(0.01)
