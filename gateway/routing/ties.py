"""Order among equals: by a hash of the request, so that no worker is first because of its name."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter

import xxhash

from gateway.routing.base import Query, Scored, Trust, WorkerView

_COST = attrgetter("cost")
_hash = xxhash.xxh3_64_intdigest
_AFFINE_GRANULES = 16
"""Blind workers: how much of the prompt decides among equals."""


class TieBreak:
    """A number per (request, worker); for a blind worker per (beginning of the prompt, worker).

    Of a blind worker nothing is known, but two requests with one beginning are better off together.
    """

    def __init__(self, query: Query) -> None:
        self._by_request = _hash(query.request_id.encode())
        keys = query.keys
        self._by_prompt = (
            int(keys[min(len(keys), _AFFINE_GRANULES) - 1]) if keys else self._by_request
        )

    def __call__(self, worker: WorkerView) -> int:
        seed = self._by_prompt if worker.trust is Trust.BLIND else self._by_request
        return _hash(worker.id.encode(), seed)


def in_order(query: Query, scored: Sequence[Scored], digits: int = 4) -> list[Scored]:
    """By cost rounded to ``digits`` decimals (0.1 ms: less is noise), then by the tie-break."""
    ranked, below, far = sorted(scored, key=_COST), -inf, 2 * 10.0**-digits
    for item in ranked:
        cost = item.cost
        if not cost - below > far:
            break
        below = cost
    else:  # so far apart that rounding makes none of them equal
        return ranked
    tie_break = TieBreak(query)
    places = [
        (round(item.cost, digits), tie_break(item.candidate.worker), at)
        for at, item in enumerate(scored)
    ]
    return [scored[at] for _, _, at in sorted(places)]
