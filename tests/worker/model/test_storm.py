"""``bench/storm.py`` for a few seconds, and that it notices what it is there to notice."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from shared.paging import BlockPool
from worker.runner import StepPlan, StepResult

# the right answers take their time on a busy machine
pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).resolve().parents[3] / "bench" / "storm.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("storm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["storm"] = made
    spec.loader.exec_module(made)
    return made


def test_a_short_storm(script: ModuleType) -> None:
    by_name = {each.name: each for each in script.SETTINGS}
    chosen = [by_name[name] for name in ("odd block size", "nearly no room", "host memory")]
    few = tuple(replace(each, prompts=4, clients=6, longest=80) for each in chosen)
    tally = script.storm(6.0, 3, lambda _: None, few, turns=6)
    assert tally.faults == []
    assert all(tally.counts[kind] == 0 for kind in script.FAULTS)
    assert tally.counts["compared"] > 20
    for kind in ("aborts", "of adapters", "scored", "adapters loaded", "host tokens"):
        assert tally.counts[kind] > 0, kind


def small(script: ModuleType, seconds: float = 0.8) -> object:
    setting = replace(script.SETTINGS[0], clients=3, longest=40, prompts=2)
    return script.storm(seconds, 1, lambda _: None, (setting,), turns=3)


def test_wrong_tokens_are_noticed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single bit of each token."""
    right = script.UnreliableRunner.run

    def run(self: object, plan: StepPlan) -> StepResult:
        result = right(self, plan)
        return msgspec.structs.replace(
            result, tokens={each: t ^ 1 for each, t in result.tokens.items()}
        )

    monkeypatch.setattr(script.UnreliableRunner, "run", run)
    assert small(script).counts["wrong"] > 0


def test_weights_of_another_adapter_are_noticed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only with the engine under test; the right answers keep theirs."""
    right = script.UnreliableRunner.run

    def run(self: object, plan: StepPlan) -> StepResult:
        plain = tuple(msgspec.structs.replace(chunk, adapter="") for chunk in plan.chunks)
        return right(self, replace(plan, chunks=plain))

    monkeypatch.setattr(script.UnreliableRunner, "run", run)
    assert small(script, 1.5).counts["wrong"] > 0


def test_contents_lost_on_the_way_to_host_memory_are_noticed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = script.UnreliableRunner.run

    def run(self: object, plan: StepPlan) -> StepResult:
        return right(self, replace(plan, copies=()))

    monkeypatch.setattr(script.UnreliableRunner, "run", run)
    setting = next(each for each in script.SETTINGS if each.host_blocks)
    few = replace(setting, n_blocks=20, prompts=4, clients=4, longest=80)
    tally = script.storm(1.0, 1, lambda _: None, (few,), turns=10)
    assert tally.counts["host tokens"] > 0
    assert tally.counts["wrong"] > 0


def test_leaks_are_noticed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: None)
    tally = small(script)
    assert tally.counts["leaks"] + tally.counts["crashes"] > 0


def test_stalls_are_noticed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "STALL_S", 0.3)
    right = script.UnreliableRunner.run

    def run(self: object, plan: StepPlan) -> StepResult:
        time.sleep(3.0)
        return right(self, plan)

    monkeypatch.setattr(script.UnreliableRunner, "run", run)
    assert small(script).counts["stalls"] > 0
