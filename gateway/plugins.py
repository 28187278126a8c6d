"""Policies from outside the package: ``module:Class``, or installed under an entry point.

    [project.entry-points."headwater.policies"]      # in the plug-in's own pyproject.toml
    warmest = "my_package.warmest:Warmest"

Nothing is imported unless it is asked for. What is loaded is checked against the policies' contract
before the gateway listens: a broken plug-in is an error at the start, not one of each request.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from gateway.config import RoutingConfig
from gateway.routing.base import Policy
from gateway.routing.catalogue import FACTORIES, Factory, make_policies
from gateway.routing.contract import ContractError, check_policy
from gateway.routing.cost import CostModel
from shared.errors import ConfigError

GROUP = "headwater.policies"
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def policy_names() -> list[str]:
    """Every name that can be asked for, our own first."""
    return [*FACTORIES, *sorted(_installed().keys() - FACTORIES.keys())]


def find_policy(name: str, key: str = "routing.policy") -> Factory:
    """The factory behind a name, imported if it is not ours.

    :param key: what the name was given as, for errors.
    :raises ConfigError: there is none, it cannot be imported, or it is no policy.
    """
    ours, installed = FACTORIES.get(name), _installed().get(name)
    if ours is not None and installed is not None:
        reason = f"is also the name of a plug-in ({installed.value}): rename the plug-in"
        raise ConfigError(key, name, reason)
    if ours is not None:
        return ours
    target = name if installed is None and ":" in name else installed and installed.value
    if not target:
        known = policy_names()
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        reason = f"is none of {', '.join(known)}, nor module:Class{hint}"
        raise ConfigError(key, name, reason)
    return _factory(_load(target, name, key))


def all_policies(config: RoutingConfig) -> dict[str, Policy]:
    """What a gateway needs: ours, the configured one, and with ``allow_policy_header`` all that are
    installed.

    :raises ConfigError: one cannot be loaded, breaks the contract or refuses its settings.
    """
    wanted = [config.policy, *(policy_names() if config.allow_policy_header else ())]
    foreign = [name for name in dict.fromkeys(wanted) if name not in FACTORIES]
    policies = make_policies(config)
    for name in foreign:
        policies[name] = make_checked(find_policy(name), name, config)
    if config.policy in FACTORIES:
        find_policy(config.policy)
    _check_options(config, {*policies, *(policy.name for policy in policies.values())})
    return policies


def make_checked(
    factory: Factory, name: str, config: RoutingConfig, key: str = "routing.policy"
) -> Policy:
    """A policy from outside, made and checked.

    :raises ConfigError: it breaks the contract or refuses its settings.
    """
    make: Callable[[], Policy] = partial(factory, config, CostModel())
    try:
        made = make()
        known_as = getattr(made, "name", None)
        if not isinstance(known_as, str) or not _NAME.fullmatch(known_as):
            raise ContractError("its name must be up to 64 letters, digits or any of _ . : -")
        check_policy(make)
    except ConfigError:
        raise
    except Exception as error:
        reason = f"is no policy that keeps its contract: {type(error).__name__}: {error}"
        raise ConfigError(key, name, reason) from error
    return made


def _check_options(config: RoutingConfig, known: Iterable[str]) -> None:
    for name in config.options.keys() - set(known):
        reason = f"there is no policy of this name in use: {', '.join(sorted(known))}"
        raise ConfigError(f"routing.options.{name}", dict(config.options[name]), reason)


def _installed() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(target: str, name: str, key: str) -> object:
    module, _, attribute = target.partition(":")
    try:
        found: object = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            hint = " (its folder must be on PYTHONPATH, or the package installed)"
        reason = f"cannot be imported: {type(error).__name__}: {error}{hint}"
        raise ConfigError(key, name, reason) from error
    return found


def _factory(found: object) -> Factory:
    """A class with ``from_config(config, cost)``, or anything that makes a policy when called."""
    from_config: Factory | None = getattr(found, "from_config", None)
    if from_config is not None:
        return from_config

    def make(config: RoutingConfig, cost: CostModel) -> Policy:
        made: Policy = found()  # type: ignore[operator]  # a mistake is told by make_checked
        return made

    return make
