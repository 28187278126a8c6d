"""Who holds most of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from gateway.config import RoutingConfig
from gateway.routing.base import Candidate, Query, Scored, key_tokens
from gateway.routing.cost import CostModel
from gateway.routing.options import NonNegative, options_of
from gateway.routing.policies.least_loaded import load_of
from gateway.routing.ties import TieBreak


def by_match(query: Query, candidates: Sequence[Candidate]) -> list[Scored]:
    """Fewest uncached tokens first, equal ones by load."""
    total = max((item.matched_tokens for item in candidates), default=0)
    total = max(total, query.prompt_tokens, key_tokens(query))
    tie_break = TieBreak(query)
    return sorted(
        (Scored(item, float(total - item.matched_tokens)) for item in candidates),
        key=lambda item: (
            item.cost,
            round(load_of(item.candidate.worker), 4),
            tie_break(item.candidate.worker),
        ),
    )


class LongestPrefixOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker with more than ``load_factor`` x the least requests + ``load_slack`` comes last."""

    load_factor: NonNegative = 1.5
    load_slack: NonNegative = 8.0


class LongestPrefix:
    """Longest usable match among workers that are not far busier than the idlest one.

    Equal matches go to the least loaded. The guard looks at the minimum: relative to the mean it
    would starve workers that never got a prefix that all the others hold.
    """

    name = "longest_prefix"

    def __init__(self, options: LongestPrefixOptions) -> None:
        self._options = options

    @classmethod
    def from_config(cls, config: RoutingConfig, cost: CostModel) -> LongestPrefix:
        """With ``[routing.options.longest_prefix]``."""
        return cls(options_of(config, cls.name, LongestPrefixOptions))

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """Cost is the number of uncached tokens; those past the guard come after all others."""
        least = min((item.worker.requests for item in candidates), default=0)
        guard = self._options.load_factor * least + self._options.load_slack
        ranked = by_match(query, candidates)
        return sorted(ranked, key=lambda item: item.candidate.worker.requests > guard)
