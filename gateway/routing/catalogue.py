"""Every policy by name. Explicit: nothing registers itself.

A policy of one's own is one file and one line here (``docs/add-a-policy.md``), or stays outside and
is found by ``gateway.plugins``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.config import RoutingConfig
from gateway.routing.base import Policy
from gateway.routing.cost import CostModel, CostPolicy
from gateway.routing.options import NoOptions, options_of
from gateway.routing.policies.cache_aware import CacheAware
from gateway.routing.policies.dynamo_linear import DynamoLinear
from gateway.routing.policies.least_loaded import LeastLoaded
from gateway.routing.policies.lmetric import LMetric
from gateway.routing.policies.longest_prefix import LongestPrefix
from gateway.routing.policies.prefix_hash import PrefixHash
from gateway.routing.policies.random_choice import RandomChoice
from gateway.routing.policies.round_robin import RoundRobin
from gateway.routing.policies.session import Session
from gateway.routing.policies.two_choices import TwoChoices

Factory = Callable[[RoutingConfig, CostModel], Policy]
"""Makes a fresh policy; raises ``ConfigError`` for settings that do not fit."""


def _bare(name: str, make: Factory) -> Factory:
    """Of a policy without a table of its own in ``[routing.options]``."""

    def factory(config: RoutingConfig, cost: CostModel) -> Policy:
        options_of(config, name, NoOptions)
        return make(config, cost)

    return factory


FACTORIES: Mapping[str, Factory] = {
    "cost": _bare("cost", lambda config, cost: CostPolicy(cost)),
    "round_robin": _bare("round_robin", lambda config, cost: RoundRobin()),
    "random": _bare("random", lambda config, cost: RandomChoice()),
    "least_loaded": _bare("least_loaded", lambda config, cost: LeastLoaded()),
    "two_choices": _bare("two_choices", lambda config, cost: TwoChoices()),
    "session": _bare("session", lambda config, cost: Session()),
    "prefix_hash": _bare("prefix_hash", PrefixHash.from_config),
    "longest_prefix": LongestPrefix.from_config,
    "cache_aware": CacheAware.from_config,
    "lmetric": _bare("lmetric", lambda config, cost: LMetric()),
    "dynamo_linear": DynamoLinear.from_config,
}


def make_policies(config: RoutingConfig, cost: CostModel | None = None) -> dict[str, Policy]:
    """A fresh instance of each policy. ``cost``: as the router has it; None = the default."""
    return {name: make(config, cost or CostModel()) for name, make in FACTORIES.items()}
