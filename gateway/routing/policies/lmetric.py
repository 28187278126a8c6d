"""LMetric's product, re-implemented in the form that NVIDIA Dynamo ships.

    cost = max(0, prefill ahead + prompt - cached) * (decode + 1)   (blocks)

Nothing to tune: the product weighs prefill left to compute against how much is decoding there.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gateway.routing.base import Candidate, Query, Scored
from gateway.routing.policies.blocks import block_load
from gateway.routing.ties import in_order

_HOST_CREDIT = 0.75


class LMetric:
    """Prefill blocks left to compute times KV blocks in use."""

    name = "lmetric"

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """The product, in blocks squared."""
        scored = []
        for item in candidates:
            load = block_load(query, item, _HOST_CREDIT)
            scored.append(Scored(item, load.prefill * (load.decode + 1.0)))
        return in_order(query, scored)
