"""Logging: structlog and the standard library share one form, one line each.

Values are never trusted: control characters in them are escaped, so that a model name with a line
end (or a terminal escape) stays part of its own line. Never log prompt text, keys or tokens.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor

from shared.settings import LogConfig

QUIET = ("aiohttp.access", "httpx", "httpcore", "urllib3", "filelock")
"""Libraries that write a line per request: only their warnings are of use."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))}
_ESCAPES = {
    **_CONTROLS,
    0x09: "\\t",
    0x0A: "\\n",
    0x0D: "\\r",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def configure(config: LogConfig, stream: TextIO | None = None) -> None:
    """Send all log lines to ``stream`` (stderr) as ``config`` says. May be called again."""
    target = sys.stderr if stream is None else stream
    level = logging.getLevelNamesMapping()[config.level.upper()]
    text = config.format == "text" or (config.format == "auto" and target.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    ending = _text_form(colors=target.isatty()) if text else _json_form()
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Lossy(target))),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.captureWarnings(True)
    set_level(config)


def set_level(config: LogConfig) -> None:
    """Another least level; loggers that were bound already keep theirs."""
    level = logging.getLevelNamesMapping()[config.level.upper()]
    structlog.configure(
        **{**structlog.get_config(), "wrapper_class": structlog.make_filtering_bound_logger(level)}
    )
    root = logging.getLogger()
    root.setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def json_lines() -> Callable[[str], object] | None:
    """Writes finished lines of JSON where log lines go; None if those have another form."""
    configured = structlog.get_config()
    if not any(
        isinstance(one, structlog.processors.JSONRenderer) for one in configured["processors"]
    ):
        return None
    return cast("Callable[[str], object]", configured["logger_factory"]().msg)


class _Lossy:
    """A stream whose reader may have gone, or that was closed: then lines are lost, and whoever
    writes them goes on. An engine must not end because nobody reads its log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def _json_form() -> list[Processor]:
    """JSON escapes control characters itself; tracebacks become one string."""
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]


def _text_form(*, colors: bool) -> list[Processor]:
    # Plain tracebacks: the fancy ones print local variables, and a local may be a prompt or a key.
    renderer = structlog.dev.ConsoleRenderer(
        colors=colors, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
    )
    return [escape_values, renderer]


def escape_values(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Processor: control characters in keys' values (and the event) become visible escapes.

    ``exc_info`` is left alone: a traceback may take several lines in the text form.
    """
    for key, value in event.items():
        if key != "exc_info":
            event[key] = _escaped(value)
    return event


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.translate(_ESCAPES)
    if isinstance(value, MutableMapping | list | tuple | set | BaseException):
        return str(value).translate(_ESCAPES)
    return value
