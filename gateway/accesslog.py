"""The access log: one line per request, never what was asked or answered.

Lines of JSON are put together here and written some at a time: through the general logger one line
costs as much as reading a request. On a terminal they go through that, like all others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from shared.logs import json_lines
from shared.settings import LogConfig

FLUSH_S = 0.05
"""Longest time that a line lies here."""
_MAX_LINES = 512


class AccessLine(msgspec.Struct, omit_defaults=True):
    """What is told of a request. Times are seconds."""

    id: str
    route: str
    model: str
    status: int
    total_s: float
    worker: str | None = None
    outcome: str | None = None
    attempts: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None


class AccessLog(Protocol):
    """Where access lines go."""

    def tell(self, line: AccessLine) -> None:
        """Write a line, soon."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class LoggedLines:
    """Through the general logger."""

    def __init__(self) -> None:
        # Bound once: putting a logger together costs as much as writing the line.
        self._log = structlog.get_logger("headwater.access").bind()

    def tell(self, line: AccessLine) -> None:
        """See :class:`AccessLog`."""
        fields = {
            name: value
            for name in line.__struct_fields__
            if (value := getattr(line, name)) is not None
        }
        self._log.info("request", **fields)

    def close(self) -> None:
        """See :class:`AccessLog`."""


class JsonLines:
    """Lines of JSON, written together."""

    def __init__(self, write: Callable[[str], object]) -> None:
        """Needs a running event loop. ``write`` adds the last line end and does not raise."""
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._encode = msgspec.json.Encoder().encode
        self._stamps = _Stamps()
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, line: AccessLine) -> None:
        """See :class:`AccessLog`."""
        # What the general logger adds to its own lines, in front.
        head = b'{"timestamp":"%b","level":"info","event":"request",' % self._stamps.text()
        self._lines.append(head + self._encode(line)[1:])
        if len(self._lines) >= _MAX_LINES:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self._flush)

    def close(self) -> None:
        """See :class:`AccessLog`."""
        self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if lines:
            self._write(b"\n".join(lines).decode())


class NoLines:
    """The level is above that of access lines."""

    def tell(self, line: AccessLine) -> None:
        """See :class:`AccessLog`."""

    def close(self) -> None:
        """See :class:`AccessLog`."""


def open_access_log(config: LogConfig) -> AccessLog:
    """The access log that fits how logging was configured. Needs a running event loop."""
    if config.level in ("warning", "error"):
        return NoLines()
    write = json_lines()
    return LoggedLines() if write is None else JsonLines(write)


class _Stamps:
    """The time in ISO 8601, UTC; the part down to the second is made once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._text = b""

    def text(self) -> bytes:
        """Now."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
        return b"%b.%06dZ" % (self._text, int((now - second) * 1e6))
