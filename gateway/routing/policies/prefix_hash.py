"""Consistent hashing with bounded loads, on the beginning of the prompt."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from math import ceil
from random import Random

import xxhash

from gateway.config import RoutingConfig
from gateway.routing.base import Candidate, Query, Scored
from gateway.routing.cost import CostModel
from shared.blocks import GRANULE
from shared.types import WorkerId

_VIRTUAL_NODES = 128


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

    @classmethod
    def from_config(cls, config: RoutingConfig, cost: CostModel) -> PrefixHash:
        """With the settings ``routing.prefix_hash_*``."""
        return cls(config.prefix_hash_tokens, config.prefix_hash_load_factor)

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
