"""Views and queries for the tests of single policies."""

from __future__ import annotations

from typing import Any

from gateway.routing.base import Query, Trust, WorkerState, WorkerView
from shared.types import BlockKey, RequestId, WorkerId


def view(name: str, **fields: Any) -> WorkerView:
    values: dict[str, Any] = {
        "id": WorkerId(name),
        "state": WorkerState.READY,
        "trust": Trust.EXACT,
        "block_size": 16,
        "inflight": 0,
        "booked_prefill_s": 0.0,
        "booked_decode_tokens": 0,
        "prefill_s_per_token": 1e-4,
        "overhead_s": 0.005,
        "failure_rate": 0.0,
    }
    return WorkerView(**(values | fields))


def query(number: int = 0, keys: tuple[int, ...] = (), tokens: int = 1000) -> Query:
    return Query(
        request_id=RequestId(f"r{number}"),
        model="m",
        prompt_tokens=tokens,
        max_tokens=0,
        arrived=0.0,
        keys=[BlockKey(key) for key in keys],
    )
