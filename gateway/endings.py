"""How attempts and requests end: the booking is released, the record goes to all that keep it."""

from __future__ import annotations

from gateway.decision import AttemptEnd, Reject
from gateway.gate import Gate
from gateway.parts import Parts
from gateway.records import Outcome, RequestRecord
from gateway.work import Work
from shared.errors import ApiError
from shared.openai import Usage


class Endings:
    """Ends what the pipeline has begun; keeps no state."""

    def __init__(self, parts: Parts, gate: Gate) -> None:
        self._router, self._metrics, self._gate = parts.router, parts.metrics, gate
        self._sinks, self._traces = [sink.record for sink in parts.sinks], parts.traces
        self._givers, self._suspect, self._clock = parts.givers, parts.suspect, parts.clock

    def end(
        self,
        item: Work,
        outcome: Outcome,
        status: int,
        usage: Usage | None = None,
        *,
        final: bool = True,
        silent: bool = False,
    ) -> None:
        """Release the attempt's booking and keep its record; nothing if that has been done.

        :param silent: as in ``AttemptEnd``.
        """
        lease, item.lease = item.lease, None
        if lease is None:
            return
        tap = item.tap
        end = AttemptEnd(
            outcome=outcome,
            status=status,
            silent=silent,
            usage=tap.usage if tap is not None else usage,
            output_tokens=tap.content_events if tap is not None else 0,
            itl_s=tap.itl_s if tap is not None else None,
            final=final,
            route=item.inbound.route,
            wall_at=item.inbound.wall_at,
            client_id=item.inbound.client_id,
        )
        now = self._clock()
        record = lease.finish(end, now)
        self._keep(item, record)
        if item.ticket is not None and final:
            computed = record.flow.prompt - record.flow.delivered
            self._gate.queue.settle(item.ticket, computed + record.output_tokens)
        self._gate.released(now)
        if outcome is Outcome.UPSTREAM_ERROR:
            self._suspect(lease.worker)

    def gave(self, item: Work, response: str) -> None:
        """The client has the id of a response, to go on from it or to ask for it."""
        if item.lease is not None:
            self._givers.gave(item.inbound.tenant, response, item.lease.worker)

    def rejected(self, item: Work, reject: Reject) -> ApiError:
        """Keep the record of a request that reaches no worker; returns what its client is told."""
        inbound, error = item.inbound, reject.error
        if error.status >= 429:
            self._metrics.shed(reject.reason)
        record = self._router.reject_record(
            item.query, inbound.route, error, self._clock(), inbound.wall_at
        )
        self._keep(item, record)
        return error

    def _keep(self, item: Work, record: RequestRecord) -> None:
        item.inbound.record = record
        for take in self._sinks:
            take(record)
        route = item.route if record.attempt else None
        for trace in self._traces:
            trace(route, record)
        if item.trace is not None:
            item.trace.keep(record)
