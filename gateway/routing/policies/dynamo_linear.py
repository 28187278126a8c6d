"""The linear cost of NVIDIA Dynamo's KV router, re-implemented.

    cost = prefill_load_scale * max(0, prefill ahead + prompt - cached) + decode + prompt   (blocks)

At temperature 0 the least cost wins. Above it costs are stretched to 0..1 over the candidates and a
worker is drawn with weight exp(-cost / temperature); the rest follows in the same way, so that the
retry plan is a draw as well. Ties go by a hash of the request (there: smallest tree, then random).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from random import Random

import msgspec

from gateway.config import RoutingConfig
from gateway.routing.base import Candidate, Query, Scored
from gateway.routing.cost import CostModel
from gateway.routing.options import NonNegative, Share, options_of
from gateway.routing.policies.blocks import block_load
from gateway.routing.ties import in_order


class DynamoLinearOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its settings."""

    temperature: NonNegative = 0.0
    prefill_load_scale: NonNegative = 1.0
    host_credit: Share = 0.75
    """What a block in host memory counts."""


class DynamoLinear:
    """Prefill blocks left to compute plus KV blocks in use."""

    name = "dynamo_linear"

    def __init__(self, options: DynamoLinearOptions) -> None:
        self._options = options

    @classmethod
    def from_config(cls, config: RoutingConfig, cost: CostModel) -> DynamoLinear:
        """With ``[routing.options.dynamo_linear]``."""
        return cls(options_of(config, cls.name, DynamoLinearOptions))

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """Cost in blocks, with its two terms."""
        options, scored = self._options, []
        for item in candidates:
            load = block_load(query, item, options.host_credit)
            parts = {
                "prefill": options.prefill_load_scale * load.prefill,
                "decode": load.decode + load.incoming,
            }
            scored.append(Scored(item, sum(parts.values()), parts))
        ranked = in_order(query, scored)
        return self._drawn(ranked, rng) if options.temperature > 0 else ranked

    def _drawn(self, ranked: list[Scored], rng: Random) -> list[Scored]:
        """A draw without replacement: the largest of (-cost / T + Gumbel noise) first."""
        if not ranked:
            return []
        least = ranked[0].cost
        span = max(item.cost for item in ranked) - least
        by_name = sorted(ranked, key=lambda item: item.candidate.worker.id)
        marks = {
            item.candidate.worker.id: (
                -((item.cost - least) / span if span > 0 else 0.0) / self._options.temperature
                - log(-log(rng.uniform(1e-12, 1.0 - 1e-12)))
            )
            for item in by_name
        }
        return sorted(by_name, key=lambda item: -marks[item.candidate.worker.id])
