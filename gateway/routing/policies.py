"""The simple policies: baselines to compare with, and fall-backs."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from math import ceil
from random import Random

import xxhash

from gateway.routing.base import Candidate, Query, Scored, WorkerView
from gateway.routing.ties import TieBreak, in_order
from shared.blocks import GRANULE
from shared.types import WorkerId

_VIRTUAL_NODES = 128


def load_of(worker: WorkerView) -> float:
    """Requests it is busy with; booked prefill decides among equals (below one request)."""
    return worker.requests + worker.booked_prefill_s / (1.0 + worker.booked_prefill_s)


class RoundRobin:
    """Whoever was chosen longest ago. State: the turn at which each worker was chosen last."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[WorkerId, int] = {}

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """By turn; fair also when workers come, go or serve different models."""
        ids = {candidate.worker.id for candidate in candidates}
        if len(self._last) > 4 * len(ids) + 64:
            self._last = {worker: at for worker, at in self._last.items() if worker in ids}
        scored = [Scored(item, float(self._last.get(item.worker.id, 0))) for item in candidates]
        scored.sort(key=lambda item: (item.cost, item.candidate.worker.id))
        self._turn += 1
        if scored:
            self._last[scored[0].candidate.worker.id] = self._turn
        return scored


class RandomChoice:
    """Uniformly at random."""

    name = "random"

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """A random order."""
        shuffled = rng.sample(list(candidates), len(candidates))
        return [Scored(candidate, float(at)) for at, candidate in enumerate(shuffled)]


class LeastLoaded:
    """Fewest requests, then least prefill work booked; knows nothing of prefixes."""

    name = "least_loaded"

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """By :func:`load_of`."""
        return in_order(query, [Scored(item, load_of(item.worker)) for item in candidates])


class LongestPrefix:
    """Longest usable match, whatever the load; equal matches go to the least loaded."""

    name = "longest_prefix"

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """Cost is the number of uncached tokens."""
        total = max((item.matched_tokens for item in candidates), default=0)
        total = max(total, query.prompt_tokens, len(query.keys) * GRANULE)
        scored = [Scored(item, float(total - item.matched_tokens)) for item in candidates]
        tie_break = TieBreak(query)
        return sorted(
            scored,
            key=lambda item: (
                item.cost,
                round(load_of(item.candidate.worker), 4),
                tie_break(item.candidate.worker),
            ),
        )


class PrefixHash:
    """Consistent hashing of the prompt's beginning, with bounded loads.

    A worker that has ``load_factor`` times the mean load is passed over for the next one on the
    ring. Prompts without keys are placed by their request id.

    :param prefix_tokens: how much of the prompt decides; shorter prompts count as a whole.
    """

    name = "prefix_hash"

    def __init__(self, prefix_tokens: int, load_factor: float) -> None:
        self._granules = max(1, prefix_tokens // GRANULE)
        self._load_factor = load_factor
        self._members: tuple[WorkerId, ...] = ()
        self._ring: list[tuple[int, int]] = []

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """Ring order from the prompt's place, workers with room first."""
        ordered = sorted(candidates, key=lambda item: item.worker.id)
        self._build(tuple(item.worker.id for item in ordered))
        total = sum(item.worker.requests for item in ordered)
        bound = ceil(self._load_factor * (total + 1) / max(1, len(ordered)))
        walk = [ordered[at] for at in self._walk(self._place(query), len(ordered))]
        walk.sort(key=lambda item: item.worker.requests >= bound)
        return [Scored(item, float(at)) for at, item in enumerate(walk)]

    def _place(self, query: Query) -> int:
        if not query.keys:
            return xxhash.xxh3_64_intdigest(query.request_id.encode())
        key = query.keys[min(self._granules, len(query.keys)) - 1]
        return xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"))

    def _walk(self, place: int, members: int) -> list[int]:
        found: dict[int, None] = {}
        start = bisect(self._ring, (place, -1))
        for step in range(len(self._ring)):
            if len(found) == members:
                break
            found.setdefault(self._ring[(start + step) % len(self._ring)][1])
        return list(found)

    def _build(self, members: tuple[WorkerId, ...]) -> None:
        """The ring depends only on the names, so all gateways have the same one."""
        if members == self._members:
            return
        self._members = members
        self._ring = sorted(
            (xxhash.xxh3_64_intdigest(worker.encode(), seed), at)
            for at, worker in enumerate(members)
            for seed in range(_VIRTUAL_NODES)
        )
