"""The threshold rule of SGLang's and vLLM's routers, re-implemented.

    unbalanced      max - min > balance_abs  and  max > balance_rel * min   (requests)
    unbalanced   -> fewest requests, whatever is cached
    else match / prompt > match_threshold -> the longest match
    else         -> fewest requests

The defaults are those of the command line there (0.3, 64, 1.5); its library has 0.5, 32, 1.1. Two
differences: what is cached is our index, not a tree of what was sent, and a miss goes to the least
loaded worker as in newer versions, not to the one with the smallest tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from gateway.config import RoutingConfig
from gateway.routing.base import Candidate, Query, Scored, key_tokens
from gateway.routing.cost import CostModel
from gateway.routing.options import NonNegative, Share, options_of
from gateway.routing.policies.least_loaded import load_of
from gateway.routing.policies.longest_prefix import by_match
from gateway.routing.ties import in_order


class CacheAwareOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The three thresholds."""

    match_threshold: Share = 0.3
    balance_abs: NonNegative = 64.0
    balance_rel: NonNegative = 1.5


class CacheAware:
    """Longest match, unless it is short or the fleet is unbalanced."""

    name = "cache_aware"

    def __init__(self, options: CacheAwareOptions) -> None:
        self._options = options

    @classmethod
    def from_config(cls, config: RoutingConfig, cost: CostModel) -> CacheAware:
        """With ``[routing.options.cache_aware]``."""
        return cls(options_of(config, cls.name, CacheAwareOptions))

    def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
        """Cost is the uncached tokens where the match decides, else the load."""
        if not self._follows_match(query, candidates):
            return in_order(query, [Scored(item, load_of(item.worker)) for item in candidates])
        return by_match(query, candidates)

    def _follows_match(self, query: Query, candidates: Sequence[Candidate]) -> bool:
        if not candidates:
            return False
        options = self._options
        loads = [item.worker.requests for item in candidates]
        most, least = max(loads), min(loads)
        if most - least > options.balance_abs and most > options.balance_rel * least:
            return False
        best = max(item.matched_tokens for item in candidates)
        total = max(query.prompt_tokens, key_tokens(query))
        return best > 0 and best > options.match_threshold * total
