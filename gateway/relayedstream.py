"""Event streams of the routes that are relayed: where their content begins, and whether they end.

OpenAI's Responses and Anthropic's Messages open with events that say nothing yet. Those are held
back: a stream that fails behind them can still be asked of another worker, or get an error status.
Events pass as they came, whole ones only. Pure: bytes in, bytes out.
"""

from __future__ import annotations

from typing import Any

from shared import dialogue, laxjson, sse
from shared.openai import Usage

_OPENING = frozenset(
    "response.created response.queued response.in_progress response.output_item.added "
    "response.content_part.added message_start content_block_start ping".split()
)
_ALIVE = "ping"
"""Says no more than that the connection is there."""
_FAILED = frozenset({"error", "response.failed"})
_ENDS = frozenset({"response.completed", "response.incomplete", "message_stop"})
_MOST_EVENT = 64 << 20
"""Bytes; the last event may hold all of an answer, pictures too."""
_MOST_HELD = 1 << 20
"""Bytes of opening events; with more of them the stream has begun, whatever they are."""


class RelayTap:
    """State of one stream."""

    def __init__(self) -> None:
        self._parser = sse.SseParser(_MOST_EVENT)
        self._held: list[bytes] = []
        self._size = 0
        self._counts: dict[str, Any] = {}
        self.started = False
        """Content has come: bytes are given out."""
        self.complete = False
        """The stream came to its end, a good or a bad one."""
        self.failed = False
        """What the worker ended it with was its own error."""
        self.error: dict[str, Any] | None = None
        """That error, of a stream that had not started."""
        self.usage: Usage | None = None
        """What it took, as far as it has said."""
        self.last_at = 0.0
        """When its latest event came that says something, in monotonic seconds."""
        self.response = ""
        """The id to go on from it; empty if it has none."""

    def feed(self, data: bytes, now: float) -> bytes:
        """Take bytes from the worker; returns what may go to the client.

        Raises ``sse.SseEventTooLarge``.
        """
        for event in self._parser.feed(data):
            self._take(event, now)
        return self._release()

    def end(self, now: float) -> bytes:
        """The worker's stream is over: what is left to send."""
        for event in self._parser.finish():
            if event.complete:
                self._take(event, now)
        return self._release()

    def _take(self, event: sse.SseEvent, now: float) -> None:
        if self.error is not None:
            return
        text = event.data or ""
        value = _decoded(text)
        if value is None:
            if text and text.strip() != "[DONE]":
                return  # malformed: no client can read it
            value = {}
        kind = event.event or str(value.get("type") or "")
        if text and kind != _ALIVE:
            self.last_at = now
        self._account(value)
        self.failed = self.failed or kind in _FAILED
        if self.failed and not self.started:
            self.error = _error_of(value)
            return
        self._held.append(event.raw)
        self._size += len(event.raw)
        if kind in _ENDS or kind in _FAILED or text.strip() == "[DONE]":
            self.started = self.complete = True
        elif (text and kind not in _OPENING) or self._size > _MOST_HELD:
            self.started = True

    def _account(self, value: dict[str, Any]) -> None:
        """Responses count at their end, Messages at both: what is cached first, the output last."""
        response = value.get("response")
        if isinstance(response, dict):
            self.response = dialogue.response_id(response) or self.response
            self.usage = dialogue.read_usage(response.get("usage")) or self.usage
            return
        message = value.get("message")
        counted = value if message is None else message
        usage = counted.get("usage") if isinstance(counted, dict) else None
        if isinstance(usage, dict):
            self._counts.update({name: n for name, n in usage.items() if n is not None})
            self.usage = dialogue.read_usage(self._counts) or self.usage

    def _release(self) -> bytes:
        if not self.started:
            return b""
        data = b"".join(self._held)
        self._held.clear()
        return data


def error_event(error: dict[str, Any]) -> bytes:
    """An error in a running stream, as the clients of either route understand it."""
    told = {name: error.get(name) for name in ("code", "message", "param")}
    return b"event: error\n" + sse.encode(laxjson.encode({"type": "error", "error": error, **told}))


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        value = laxjson.decode(text)
    except laxjson.NotJson:
        return None
    return value if isinstance(value, dict) else None


def _error_of(value: dict[str, Any]) -> dict[str, Any]:
    """``{"error": {...}}``, ``{"response": {"error": {...}}}``, or the bare object."""
    inner = value.get("response")
    for place in (value, inner if isinstance(inner, dict) else {}):
        error = place.get("error")
        if isinstance(error, dict):
            return error
    return {"message": value.get("message"), "code": value.get("code")}
