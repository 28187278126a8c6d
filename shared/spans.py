"""Spans for OpenTelemetry: the W3C trace context, and a thread that exports what it is handed.

The SDK (extra ``otel``) is imported only where an endpoint is configured. A request hands over one
callable; attributes are put together, encoded and sent in the thread. A collector that is slow or
gone costs spans, never a request.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from shared.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

EVERY_S = 1.0
"""Time between two exports."""
MAX_WAITING = 4096
"""Beyond so many requests that wait for an export the oldest are dropped."""
CLOSE_S = 2.0
"""How long the last export may take."""
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class Parent:
    """Whose child a span is, as a caller said in ``traceparent``."""

    trace_id: int
    span_id: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class Span:
    """One finished span. Times are seconds since the epoch; ``parent_id`` 0: it has none."""

    name: str
    server: bool
    """It answers a call; else it makes one."""
    trace_id: int
    span_id: int
    parent_id: int
    start_s: float
    end_s: float
    attributes: Mapping[str, str | int | float | bool]
    failed: bool


Making = Callable[[], Sequence[Span]]


def read_parent(header: str | None) -> Parent | None:
    """The context in a ``traceparent`` header; None if there is none or it is malformed."""
    found = _PARENT.fullmatch((header or "").strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(found[4], 16) & 1))


def traceparent(trace_id: int, span_id: int) -> str:
    """The header for a callee of a span that is exported."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"


class SpanExport:
    """Takes spans on the event loop's thread, exports them in its own."""

    def __init__(self, exporter: SpanExporter, service: str) -> None:
        self._exporter, self._service = exporter, service
        self._waiting: deque[Making] = deque(maxlen=MAX_WAITING)
        self._stop = threading.Event()
        self._log = structlog.get_logger("headwater.spans")
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, making: Making) -> None:
        """Export what ``making`` gives, soon. It is called in another thread."""
        self._waiting.append(making)

    def close(self) -> None:
        """Export what waits, for a limited time."""
        self._stop.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._flush()
        self._flush()
        self._exporter.shutdown()

    def _flush(self) -> None:
        spans: list[Span] = []
        while self._waiting:
            spans.extend(self._waiting.popleft()())
        if not spans:
            return
        try:
            self._exporter.export(_readable(spans, self._service))
        except Exception:  # noqa: BLE001 - whatever a collector does, requests go on
            self._log.warning("spans_lost", spans=len(spans), exc_info=True)


def open_export(endpoint: str, service: str) -> SpanExport | None:
    """The export to a collector's OTLP endpoint over HTTP; None if there is none.

    :raises ConfigError: the extra is not installed, or the endpoint is no URL.
    """
    if not endpoint:
        return None
    key = "telemetry.otlp_endpoint"
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(key, endpoint, "is no http:// or https:// URL")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        reason = "needs the extra: pip install 'headwater[otel]'"
        raise ConfigError(key, endpoint, reason) from None
    return SpanExport(OTLPSpanExporter(endpoint=endpoint), service)


def _readable(spans: Sequence[Span], service: str) -> list[ReadableSpan]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    resource = Resource.create({"service.name": service})
    flags = TraceFlags(TraceFlags.SAMPLED)

    def context(trace_id: int, span_id: int, remote: bool) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote=remote, trace_flags=flags)

    return [
        ReadableSpan(
            name=span.name,
            context=context(span.trace_id, span.span_id, False),
            parent=context(span.trace_id, span.parent_id, span.server) if span.parent_id else None,
            resource=resource,
            attributes=dict(span.attributes),
            kind=SpanKind.SERVER if span.server else SpanKind.CLIENT,
            status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
            start_time=int(span.start_s * 1e9),
            end_time=int(span.end_s * 1e9),
        )
        for span in spans
    ]
