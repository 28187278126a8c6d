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

FACTORIES: Mapping[str, Callable[[RoutingConfig, CostModel], Policy]] = {
    "cost": lambda config, cost: CostPolicy(cost),
    "round_robin": lambda config, cost: RoundRobin(),
    "random": lambda config, cost: RandomChoice(),
    "least_loaded": lambda config, cost: LeastLoaded(),
    "longest_prefix": lambda config, cost: LongestPrefix(),
    "prefix_hash": lambda config, cost: PrefixHash(
        config.prefix_hash_tokens, config.prefix_hash_load_factor
    ),
}


def make_policies(config: RoutingConfig, cost: CostModel | None = None) -> dict[str, Policy]:
    """A fresh instance of each policy. ``cost``: as the router has it; None = the default."""
    return {name: make(config, cost or CostModel()) for name, make in FACTORIES.items()}
