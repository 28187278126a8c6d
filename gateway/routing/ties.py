"""Order among equals: by a hash of the request, so that no worker is first because of its name."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from gateway.routing.base import Query, Scored, Trust, WorkerView

_AFFINE_GRANULES = 16
"""Blind workers: how much of the prompt decides among equals."""


def tie_break(query: Query, worker: WorkerView) -> int:
    """A number per (request, worker); for a blind worker per (beginning of the prompt, worker).

    Of a blind worker nothing is known, but two requests with one beginning are better off together.
    """
    if worker.trust is Trust.BLIND and query.keys:
        seed = int(query.keys[min(len(query.keys), _AFFINE_GRANULES) - 1])
    else:
        seed = xxhash.xxh3_64_intdigest(query.request_id.encode())
    return xxhash.xxh3_64_intdigest(worker.id.encode(), seed)


def in_order(query: Query, scored: Sequence[Scored], digits: int = 4) -> list[Scored]:
    """By cost rounded to ``digits`` decimals (0.1 ms: less is noise), then by the tie-break."""
    return sorted(
        scored,
        key=lambda item: (round(item.cost, digits), tie_break(query, item.candidate.worker)),
    )
