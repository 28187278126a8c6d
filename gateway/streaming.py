"""What of a worker's event stream the client gets to see. Pure: bytes in, bytes out.

    worker bytes -> SseParser -> per event: hold | drop | forward verbatim -> client bytes

- Nothing is given out before the first content (or the end): ``started`` tells. A stream that fails
  earlier can still be retried or become a proper error status.
- Whole events only, byte for byte; text is never decoded piecewise.
- Dropped: data that is no JSON object, events without data (comments are passed on once started),
  usage that the client did not ask for. Usage it did ask for comes once, last before ``[DONE]``.
- An event in an odd form (several ``data`` lines, lone CRs) becomes a usual one, for clients that
  read line by line.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.metevents import MetEvent, meet, read_chunk
from shared import laxjson, openai, sse
from shared.openai import GenerateRequest, RouteKind, Usage

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode

_DONE = "[DONE]"
_USUAL_BYTES = 65_536
"""Longer events are looked at closely."""
_MEETINGS = 64
"""So many events of a stream are looked at for whether they come again."""
_ENVELOPE = ("id", "object", "created", "model", "system_fingerprint")


def expected_choices(request: GenerateRequest) -> int:
    """How many choices a complete answer has."""
    prompt = request.prompt
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    return request.n * prompts


class StreamTap:
    """State of one relayed stream. After ``done`` or ``error`` nothing more is forwarded."""

    def __init__(
        self,
        request: GenerateRequest,
        read_usage: Callable[[object], Usage | None] = openai.read_usage,
    ) -> None:
        self._read_usage = read_usage
        options: dict[str, Any] = request.fields.get("stream_options") or {}
        self._usage_wanted = request.include_usage
        self._running_usage = self._usage_wanted and bool(options.get("continuous_usage_stats"))
        self._choices = expected_choices(request)
        self._chat = request.kind is RouteKind.CHAT
        self._parser = sse.SseParser()
        self._out: list[bytes] = []
        self._finished: set[int] = set()
        self._usage_event: bytes | None = None
        self._under_way = False
        """Nothing is held and nothing unfinished: the next event may be a usual one."""
        self._met: MetEvent | None = None
        self._meetings = _MEETINGS
        self.started = False
        """Content (or a clean end) has come: ``feed`` gives bytes out."""
        self.done = False
        """``[DONE]`` has come."""
        self.error: dict[str, Any] | None = None
        """The worker's own error event."""
        self.usage: Usage | None = None
        self.content_events = 0
        self.malformed = 0
        self.first_at: float | None = None
        self.last_at = 0.0

    @property
    def over(self) -> bool:
        """Nothing that still comes matters."""
        return self.done or self.error is not None

    @property
    def complete(self) -> bool:
        """The answer came to its regular end."""
        return self.done or len(self._finished) >= self._choices

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between content events; None below two."""
        if self.first_at is None or self.content_events < 2:
            return None
        return (self.last_at - self.first_at) / (self.content_events - 1)

    def feed(self, data: bytes, now: float) -> bytes:
        """Take bytes from the worker; returns what may go to the client now (whole events).

        Raises ``sse.SseEventTooLarge``.
        """
        if self.take_usual(data, now):
            return data
        for event in self._parser.feed(data):
            self._take(event, now)
        if not self.started:
            return b""
        self._under_way = not self.over and not self._parser.pending
        return self._release()

    def end(self, now: float) -> bytes:
        """The worker's stream is over: what is left to send. A complete answer gets its end mark.

        An incomplete one gets nothing: its error event is the caller's business.
        """
        for event in self._parser.finish():
            self._take(event, now)
        if self.error is None and not self.done and self.complete:
            self._finish(sse.DONE)
        return self._release() if self.started else b""

    def take_usual(self, data: bytes, now: float) -> bool:
        """Take ``data`` if it is one event as nearly all are, to be passed on as it is.

        False: nothing was taken, :meth:`feed` has to look closer.
        """
        if not self._under_way or len(data) > _USUAL_BYTES:
            return False
        if self._met is not None and self._met.again(data):
            self.content_events += 1
            self.last_at = now
            return True
        if data[:7] != b"data: {" or data[-3:] != b"}\n\n":
            return False
        if data.count(b"\n") != 2 or b"\r" in data:
            return False
        if not data.isascii() and not _is_text(data):
            return False
        chunk = read_chunk(data)
        if chunk is None or not chunk.choices or chunk.object == "error":
            return False
        for choice in chunk.choices:
            if self._chat:
                delta = choice.delta
                speaks = delta is not None and (bool(delta.get("content")) or _speaks(delta))
            else:
                speaks = bool(choice.text)
            if choice.finish_reason:
                self._note(speaks, choice.index, now)
            elif speaks:
                self.content_events += 1
                self.last_at = now
        if self._meetings:
            self._meetings -= 1
            self._met = meet(data, chunk, chat=self._chat)
        return True

    def take_chunk(self, data: bytes, now: float) -> bool:
        """As :meth:`take_usual`, if ``data`` is one chunk of HTTP/1.1 with an event that differs
        from one before in its text only."""
        met = self._met
        if met is None or not self._under_way or not met.again_in_chunk(data):
            return False
        self.content_events += 1
        self.last_at = now
        return True

    def _release(self) -> bytes:
        data = b"".join(self._out)
        self._out.clear()
        return data

    def _take(self, event: sse.SseEvent, now: float) -> None:
        if self.over:
            return
        text = event.data
        if not text:
            comment = all(line.startswith(b":") for line in event.raw.splitlines() if line)
            if self.started and comment and event.complete and _is_text(event.raw):
                self._out.append(event.raw)
            return
        if text.strip() == _DONE:
            self.done = True
            self._finish(_readable(event, _DONE))
            return
        value = _decode_object(text)
        if value is None:
            self.malformed += 1
            return
        error = value.get("error")
        if error is None and (event.event == "error" or value.get("object") == "error"):
            error = value  # some engines send the bare object
        if error is not None:
            self.error = error if isinstance(error, dict) else {"message": str(error)}
            return
        self._read(value, _readable(event, text), text, now)

    def _read(self, value: dict[str, Any], raw: bytes, text: str, now: float) -> None:
        choices = value.get("choices")
        if value.get("usage") is not None and not self._running_usage:
            self.usage = self._read_usage(value) or self.usage
            if not choices:
                self._usage_event = raw if choices == [] else _usage_event(value)
                return
            # A running count, maybe: the latest is the total.
            self._usage_event = _usage_event(value)
            raw = sse.encode(_without_usage(text))
        elif self._running_usage:
            self.usage = self._read_usage(value) or self.usage
        self._out.append(raw)
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._look_at(choice, now)

    def _look_at(self, choice: dict[str, Any], now: float) -> None:
        content = _carries_content(choice, self._chat)
        index = choice.get("index")
        known = index if isinstance(index, int) else 0
        self._note(content, None if choice.get("finish_reason") is None else known, now)

    def _note(self, content: bool, ended: int | None, now: float) -> None:
        """A choice with content, or one that ends (``ended``: its index), or neither."""
        if ended is not None:
            self._finished.add(ended)
        if content:
            self.content_events += 1
            self.last_at = now
        if content or ended is not None:
            self.started = True
            if self.first_at is None:
                self.first_at = self.last_at = now

    def _finish(self, end_mark: bytes) -> None:
        if self._usage_wanted and self._usage_event is not None:
            self._out.append(self._usage_event)
        self._out.append(end_mark)
        self.started = True


def _readable(event: sse.SseEvent, text: str) -> bytes:
    """The event as it came, or rewritten if clients that read line by line would stumble over it:
    several data lines, an odd end mark, a lone CR, a byte order mark, no blank line, bytes that are
    no text."""
    raw = event.raw
    usual = event.complete and event.data == text and "\n" not in text and _is_text(raw)
    if not usual or raw.startswith(codecs.BOM_UTF8) or b"\r" in raw.replace(b"\r\n", b""):
        return sse.encode(text.replace("\n", " "))
    return raw


def _is_text(raw: bytes) -> bool:
    """Whether it is UTF-8: clients give up on an answer that is not."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decode_object(text: str) -> dict[str, Any] | None:
    try:
        value = laxjson.decode(text)
    except laxjson.NotJson:
        return None
    return value if isinstance(value, dict) else None


def _without_usage(text: str) -> bytes:
    """A chunk without its usage; all other values stay byte for byte, if they are strict JSON."""
    try:
        fields: dict[str, Any] = _decode_fields(text)
    except (msgspec.DecodeError, RecursionError):
        fields = json.loads(text)
        del fields["usage"]
        return json.dumps(fields).encode()
    del fields["usage"]
    return _encode(fields)


def _carries_content(choice: dict[str, Any], chat: bool) -> bool:
    """Something that a reader waits for: text, reasoning, a tool call; not a role alone."""
    if not chat:
        return bool(choice.get("text"))
    delta = choice.get("delta")
    return _speaks(delta) if isinstance(delta, dict) else False


def _speaks(fields: dict[str, Any] | None) -> bool:
    if fields is None:
        return False
    return any(value for name, value in fields.items() if name != "role")


def _usage_event(value: dict[str, Any]) -> bytes:
    """The usage event that a worker should have sent, made from a chunk that carries usage."""
    body = {name: value[name] for name in _ENVELOPE if name in value}
    return sse.encode(laxjson.encode({**body, "choices": [], "usage": value["usage"]}))


def error_event(body: bytes) -> bytes:
    """An error inside a running stream, as the OpenAI clients understand it."""
    return sse.encode(body)
