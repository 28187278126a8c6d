"""Policies from outside: what is loaded, and how what cannot be is told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway import plugins
from gateway.config import RoutingConfig
from gateway.plugins import all_policies, find_policy, policy_names
from gateway.routing.base import Candidate, Query, Scored
from gateway.routing.catalogue import FACTORIES
from shared.errors import ConfigError

GOOD = '''
from gateway.routing.base import Scored

class Last:
    """By name, from the end."""

    name = "last"

    def rank(self, query, candidates, rng):
        ordered = sorted(candidates, key=lambda item: item.worker.id, reverse=True)
        return [Scored(item, float(at)) for at, item in enumerate(ordered)]
'''
HEAD = "from gateway.routing.base import Scored\n\nclass Bad:\n    name = 'bad'\n"
RANK = "    def rank(self, query, candidates, rng):\n        "
BROKEN = {
    "nothing": HEAD + RANK + "return None\n",
    "some": HEAD + RANK + "return [Scored(c, 0.0) for c in candidates[1:]]\n",
    "twice": HEAD + RANK + "return [Scored(c, 0.0) for c in [*candidates, *candidates]]\n",
    "candidates": HEAD + RANK + "return list(candidates)\n",
    "raises": HEAD + RANK + "return [Scored(candidates[0], 0.0)]\n",
    "changes": HEAD + RANK + "candidates.reverse()\n        "
    "return [Scored(c, 0.0) for c in candidates]\n",
    "own draws": "import random\n" + HEAD + RANK + "found = [Scored(c, 0.0) for c in candidates]\n"
    "        random.shuffle(found)\n        return found\n",
    "no copy": HEAD + "    def __init__(self):\n        self.mine = (n for n in 'x')\n" + RANK
    + "return [Scored(c, 0.0) for c in candidates]\n",
    "no name": HEAD.replace("'bad'", "'b a d'") + RANK
    + "return [Scored(c, 0.0) for c in candidates]\n",
    "no rank": HEAD,
    "arguments": HEAD + "    def __init__(self, more):\n        pass\n",
    "import": "import no_such_module_at_all\n",
    "syntax": "class Bad(\n",
    "exits": "raise RuntimeError('two\\nlines')\n",
}  # fmt: skip


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """``module(source)`` writes a module and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def write(source: str) -> str:
        name = f"plugin_{abs(hash(request.node.name))}_{len(made)}"
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_a_class_is_a_policy(module: Any) -> None:
    name = f"{module(GOOD)}:Last"
    policies = all_policies(RoutingConfig(policy=name))
    assert policies[name].name == "last"
    assert set(policies) == {*FACTORIES, name}


def test_from_config_gets_the_settings(module: Any) -> None:
    source = GOOD + (
        "\n    @classmethod\n    def from_config(cls, config, cost):\n        made = cls()\n"
        "        made.depth = config.options['last']['depth']\n        return made\n"
    )
    name = f"{module(source)}:Last"
    policies = all_policies(RoutingConfig(policy=name, options={"last": {"depth": 3}}))
    assert policies[name].depth == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_policy_is_one_line(module: Any, kind: str) -> None:
    name = f"{module(BROKEN[kind])}:Bad"
    with pytest.raises(ConfigError) as error:
        all_policies(RoutingConfig(policy=name))
    assert str(error.value).startswith(f"routing.policy: '{name}': ")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("least_load", "did you mean least_loaded?"),
        ("", "nor module:Class"),
        ("no_such_module:Class", "must be on PYTHONPATH"),
        ("json:NoSuchClass", "cannot be imported"),
        ("json:", "cannot be imported"),
        (":x", "cannot be imported"),
    ],
)
def test_names_that_mean_nothing(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_policy(name)
    assert hint in str(error.value)


class Point:
    """An entry point."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, module: Any) -> Any:
    """``installed(name, source)``: an entry point of that name."""
    points: list[Point] = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    return lambda name, source: points.append(Point(name, f"{module(source)}:Last"))


def test_an_installed_plug_in_is_loaded_when_it_is_wanted(installed: Any) -> None:
    installed("last", GOOD)
    assert policy_names() == [*FACTORIES, "last"]
    assert "last" not in all_policies(RoutingConfig())
    assert all_policies(RoutingConfig(policy="last"))["last"].name == "last"
    assert "last" in all_policies(RoutingConfig(allow_policy_header=True))


def test_a_plug_in_with_one_of_our_names_is_refused(installed: Any) -> None:
    installed("cost", GOOD)
    with pytest.raises(ConfigError, match="also the name of a plug-in"):
        all_policies(RoutingConfig())
    assert "random" in all_policies(RoutingConfig(policy="random"))


def test_options_of_nobody_are_refused() -> None:
    with pytest.raises(ConfigError, match="no policy of this name"):
        all_policies(RoutingConfig(options={"cache_awake": {"balance_abs": 1}}))


def test_the_type_of_a_policy_is_checked_by_mypy_too() -> None:
    class Mine:
        name = "mine"

        def rank(self, query: Query, candidates: Sequence[Candidate], rng: Random) -> list[Scored]:
            return [Scored(item, 0.0) for item in candidates]

    from gateway.routing.base import Policy
    from gateway.routing.contract import check_policy

    policy: Policy = Mine()
    check_policy(lambda: policy)
