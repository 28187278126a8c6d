"""The last requests with the decisions behind them: a bounded ring to drill down into.

    Recent.keep(route, record)  ->  find("req-...")  ->  the same explanation as ``/admin/explain``

Of each attempt the first candidates of the ranking are kept, as they were scored, not the prompt's
keys. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.decision import Overlap, Route
from gateway.explanation import workers_told
from gateway.reasons import CODES, words_of
from gateway.records import RequestRecord
from gateway.routing.base import Scored

KEPT = 256
"""Attempts."""
CANDIDATES = 12
"""Of each; a busy fleet has hundreds, and the order says which matter."""


class Seen(msgspec.Struct, frozen=True):
    """One attempt."""

    record: RequestRecord
    overlap: Overlap | None
    order: tuple[Scored, ...]
    candidates: int
    """How many there were."""


class Recent:
    """The ring."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ring: deque[Seen] = deque(maxlen=kept)

    def __len__(self) -> int:
        return len(self._ring)

    def keep(self, route: Route | None, record: RequestRecord) -> None:
        """Take an attempt at its end; ``route`` is None for a rejection."""
        if route is None:
            self._ring.append(Seen(record, None, (), 0))
            return
        order = route.order
        self._ring.append(Seen(record, route.overlap, order[:CANDIDATES], len(order)))

    def latest(self, limit: int) -> list[dict[str, Any]]:
        """Short lines, newest first."""
        found: list[dict[str, Any]] = []
        for seen in reversed(self._ring):
            if len(found) >= limit:
                break
            found.append(_line(seen.record))
        return found

    def find(self, name: str) -> list[dict[str, Any]]:
        """All attempts kept of a request, by our id or the client's, oldest first."""
        return [
            explained(seen)
            for seen in self._ring
            if name in (seen.record.request_id, seen.record.client_id)
        ]


def _line(record: RequestRecord) -> dict[str, Any]:
    return {
        "id": record.request_id,
        "at": record.at,
        "model": record.model,
        "worker": record.worker,
        "outcome": record.outcome.value,
        "final": record.final,
        "prompt": record.flow.prompt or record.prompt_tokens,
        "delivered": record.flow.delivered,
        "reported": record.reported,
        "ttft_s": record.ttft_s,
        "reason": "" if record.why is None else record.why.code,
    }


def explained(seen: Seen) -> dict[str, Any]:
    """One attempt with everything known of it."""
    record = seen.record
    return {
        "request": _known(record),
        "choice": record.worker or None,
        "policy": record.policy,
        "matched_tokens": record.matched_tokens,
        "predicted_ttft_s": record.predicted_ttft_s,
        "overlap": None if seen.overlap is None else msgspec.structs.asdict(seen.overlap),
        "reason": words_of(record),
        "reason_code": "" if record.why is None else record.why.code,
        "reject": {"message": f"refused with {record.status}"} if not record.worker else None,
        "workers": workers_told(seen.order),
        "candidates": seen.candidates,
    }


def from_records(records: Iterable[RequestRecord]) -> list[dict[str, Any]]:
    """The same for records out of a ledger, where the candidates are not told."""
    return [explained(Seen(record, None, (), 0)) for record in records]


def _known(record: RequestRecord) -> dict[str, Any]:
    """The record's plain fields, the terms of its flow that are not 0, and a rival if named."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    fields["flow"] = {name: tokens for name, tokens in fields["flow"].items() if tokens}
    del fields["path"]
    if record.why is not None:
        fields["why"]["means"] = CODES.get(record.why.code, "")
    return fields
