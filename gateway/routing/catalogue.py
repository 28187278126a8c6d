"""Every policy by name. Explicit: nothing registers itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.config import RoutingConfig
from gateway.routing.base import Policy
from gateway.routing.cost import CostModel, CostPolicy
from gateway.routing.policies import (
    LeastLoaded,
    LongestPrefix,
    PrefixHash,
    RandomChoice,
    RoundRobin,
)

FACTORIES: Mapping[str, Callable[[RoutingConfig], Policy]] = {
    "cost": lambda config: CostPolicy(CostModel()),
    "round_robin": lambda config: RoundRobin(),
    "random": lambda config: RandomChoice(),
    "least_loaded": lambda config: LeastLoaded(),
    "longest_prefix": lambda config: LongestPrefix(),
    "prefix_hash": lambda config: PrefixHash(
        config.prefix_hash_tokens, config.prefix_hash_load_factor
    ),
}


def make_policies(config: RoutingConfig) -> dict[str, Policy]:
    """A fresh instance of each policy."""
    return {name: make(config) for name, make in FACTORIES.items()}
