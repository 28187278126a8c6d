"""What keeps the cheapest worker from being a bad idea: newcomers start slowly, a copy of a popular
prefix must pay, and stale entries can heal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import xxhash
from msgspec.structs import replace

from gateway.routing.base import LEARNED, Candidate, Query, Scored
from shared.blocks import GRANULE

_HEADROOM = 1.25
"""A newcomer may have this many times the requests of a usual worker, and one more."""
_EXPLORED = 100
"""One request in so many."""
_SEED = 0x5EC0_4D00
_CLOSE = 1.1
"""How much dearer the second-best holder may be."""


def held_back(candidates: Sequence[Candidate]) -> list[int]:
    """Places of newcomers that have enough requests for now: what they can do is a guess, and to
    an empty queue many requests go before the first of them tells. Pure."""
    usual = [item.worker.inflight for item in candidates if not item.worker.fresh]
    if not usual or len(usual) == len(candidates):
        return []
    most = _HEADROOM * median(usual) + 1.0
    return [
        at
        for at, item in enumerate(candidates)
        if item.worker.fresh and item.worker.inflight + 1 > most
    ]


def paid_back(
    candidates: Sequence[Candidate], on_its_way_s: Callable[[Candidate], float]
) -> Sequence[Candidate]:
    """The candidates; while a prefix is on its way to the best holder, with no more
    ``shared_tokens`` than a second copy beside it pays back.

    It saves those who come after, as many as have come so far, the queue at that holder. What of
    that queue is the prefix itself is no reason to compute it elsewhere too: it ends with it. Pure.

    :param on_its_way_s: seconds that computing a candidate's promised tokens takes.
    """
    holders = [item for item in candidates if item.shared_tokens < GRANULE / 2]
    if len(holders) == len(candidates) or not holders:
        return candidates
    if not all(item.promised_tokens for item in holders):
        return candidates
    queue = min(item.worker.booked_prefill_s - on_its_way_s(item) for item in holders)
    found: list[Candidate] = []
    for item in candidates:
        worker = item.worker
        saved_s = item.branches * max(0.0, queue - worker.booked_prefill_s)
        most = saved_s / worker.prefill_s_per_token
        if item.shared_tokens > most:
            found.append(replace(item, shared_tokens=most))
        else:
            found.append(item)
    return found


def explored(query: Query, scored: list[Scored]) -> list[Scored]:
    """The order, in which the second-best holder is first for one matched request in 100.

    What workers without events hold is learned from what is sent there. A wrong entry of a worker
    that is never chosen would stand for ever. Which requests explore follows from their id. Pure.
    """
    if not scored or not scored[0].candidate.matched_tokens:
        return scored
    best = scored[0]
    if not _believed(best) or not _drawn(query):
        return scored
    second = next((at for at, item in enumerate(scored) if at and _believed(item)), 0)
    if not second or scored[second].cost > _CLOSE * best.cost:
        return scored
    chosen = scored[second]
    passed = [
        replace(
            item,
            cost=chosen.cost,
            parts={**item.parts, "explore": chosen.cost - item.cost},
        )
        for item in scored[:second]
    ]
    return [chosen, *passed, *scored[second + 1 :]]


def _believed(item: Scored) -> bool:
    return item.candidate.worker.trust is LEARNED and item.candidate.matched_tokens > 0


def _drawn(query: Query) -> bool:
    return xxhash.xxh3_64_intdigest(query.request_id.encode(), _SEED) % _EXPLORED == 0
