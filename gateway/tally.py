"""What each worker has served since the gateway started, for ``/admin/workers`` and live status."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.records import OK, RequestRecord


@dataclass(slots=True)
class Served:
    """Sums over a worker's finished requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """As the engine reported them."""


class WorkerTally:
    """A record sink; bounded by the number of workers there ever were under their names."""

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}

    def record(self, record: RequestRecord) -> None:
        """Count a request at the worker that answered it."""
        if not record.final or not record.worker or record.outcome is not OK:
            return
        served = self._served.get(record.worker)
        if served is None:
            served = self._served[record.worker] = Served()
        served.requests += 1
        served.prompt_tokens += record.flow.prompt
        served.cached_tokens += record.flow.delivered

    def of(self, worker: str) -> Served:
        """Sums of one worker; zeros if it served nothing."""
        return self._served.get(worker, Served())
