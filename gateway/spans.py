"""A span for each request and for each of its attempts, made from the records they leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random

from gateway.exchange import Headers
from gateway.records import Outcome, RequestRecord
from shared.spans import Span, SpanExport, read_parent, traceparent

MAX_MODEL = 128
"""Longest name of a model in a span: it comes from the client."""
_FAILED = frozenset({Outcome.UPSTREAM_ERROR, Outcome.DEADLINE, Outcome.REJECTED})


class RequestTrace:
    """The ids of one request under way. Event loop only."""

    def __init__(self, export: SpanExport, rng: Random, trace_id: int, parent_id: int) -> None:
        self._export, self._rng = export, rng
        self._trace_id, self._parent_id = trace_id, parent_id
        self._request, self._attempt = _new(rng, 64), 0

    def outgoing(self, headers: Headers) -> Headers:
        """A new attempt begins: the headers with it as the parent of what the worker does."""
        self._attempt = _new(self._rng, 64)
        kept = [pair for pair in headers if pair[0].lower() != "traceparent"]
        return [*kept, ("traceparent", traceparent(self._trace_id, self._attempt))]

    def keep(self, record: RequestRecord) -> None:
        """An attempt ended, or the request was turned away."""
        ids = (self._trace_id, self._request, self._parent_id, self._attempt)
        self._export.add(partial(spans_of, record, *ids))


class Tracing:
    """Decides which requests are traced, and gives them their ids."""

    def __init__(self, export: SpanExport, rng: Random, sample: float) -> None:
        """``sample``: share of requests without a parent that are traced, 0 to 1."""
        self._export, self._rng, self._sample = export, rng, sample

    def begin(self, headers: Mapping[str, str]) -> RequestTrace | None:
        """None: not traced; what the caller said in ``traceparent`` is passed on as it is."""
        parent = read_parent(headers.get("traceparent"))
        if parent is not None:
            if not parent.sampled:
                return None
            return RequestTrace(self._export, self._rng, parent.trace_id, parent.span_id)
        if self._rng.random() >= self._sample:
            return None
        return RequestTrace(self._export, self._rng, _new(self._rng, 128), 0)

    def close(self) -> None:
        """Export what waits; blocks for a moment."""
        self._export.close()


def spans_of(
    record: RequestRecord, trace_id: int, request: int, parent: int, attempt: int
) -> Sequence[Span]:
    """The attempt's span, and the request's with its final record. Never what was asked."""
    attributes: dict[str, str | int | float | bool] = {
        "http.route": record.route,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model[:MAX_MODEL],
        "headwater.request_id": record.request_id,
        "headwater.outcome": record.outcome.value,
        "headwater.policy": record.policy,
        "headwater.worker": record.worker,
        "headwater.trust": record.trust,
        "headwater.attempt": record.attempt,
        "headwater.prompt_tokens": record.prompt_tokens or record.flow.prompt,
        "headwater.matched_tokens": record.matched_tokens,
        "headwater.cached_tokens": record.flow.delivered,
        "headwater.output_tokens": record.output_tokens,
    }
    if record.ttft_s is not None:
        attributes["headwater.ttft_s"] = record.ttft_s
    failed = record.outcome in _FAILED
    end = record.at + record.total_s
    made: list[Span] = []
    if record.attempt:
        start = min(end, record.at + record.decided_s)
        made.append(
            Span("attempt", False, trace_id, attempt, request, start, end, attributes, failed)
        )
    if record.final:
        name = f"POST {record.route}"
        made.append(Span(name, True, trace_id, request, parent, record.at, end, attributes, failed))
    return made


def _new(rng: Random, bits: int) -> int:
    """An id; 0 is none."""
    return rng.getrandbits(bits) or 1
