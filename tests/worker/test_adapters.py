"""The registry of adapters, without threads of an engine: who may go when."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lorakit import write_fake

from shared.errors import BadRequest, InternalError, ModelNotFound
from worker.adapterfiles import AdapterRefused, read_config
from worker.adapters import Adapters
from worker.fake_adapters import FakeAdapters


class Steps:
    """Stands in for the engine: what is asked happens at the next step."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []
        self.dead = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.came = asyncio.Event()

    async def call(self, function: Callable[[], None]) -> None:
        if self.dead:
            raise InternalError("the engine is not running")
        self.came.set()
        await self.gate.wait()
        self.step()
        function()

    def post(self, function: Callable[[], None]) -> None:
        self.asked.append(function)

    def step(self) -> None:
        asked, self.asked = self.asked, []
        for function in asked:
            function()


class Rig:
    def __init__(self, folder: Path, limit: int = 2) -> None:
        self.folder, self.steps, self.changes = folder, Steps(), 0
        self.store = FakeAdapters(max_rank=16)
        self.adapters = Adapters(
            self.store,
            self.steps,
            taken=("base",),
            limit=limit,
            wall=lambda: 1.0,
            changed=self.note,
        )

    def note(self) -> None:
        self.changes += 1

    async def load(self, name: str, content: str, *, replace: bool = False) -> None:
        folder = write_fake(self.folder / f"{name}-{content}", content)
        await self.adapters.load(name, str(folder), replace=replace)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_weights_stay_until_the_last_request_ends(rig: Rig) -> None:
    await rig.load("x", "1")
    old = rig.adapters.get("x")
    with rig.adapters.using(old):
        with rig.adapters.using(old):
            await rig.adapters.unload("x")
            assert rig.adapters.get("x") is None
        rig.steps.step()
        assert len(rig.store.installed) == 1
        await rig.load("x", "2")
        assert len(rig.store.installed) == 2
    rig.steps.step()
    assert list(rig.store.installed) == [rig.adapters.served()[0].info.scope]


async def test_the_same_weights_again_while_they_leave(rig: Rig) -> None:
    await rig.load("x", "1")
    with rig.adapters.using(rig.adapters.get("x")):
        await rig.adapters.unload("x")
        await rig.load("x", "1")
        assert len(rig.store.installed) == 1
    rig.steps.step()
    assert len(rig.store.installed) == 1
    assert [one.leaving for one in rig.adapters] == [False]


async def test_one_that_left_does_not_count(rig: Rig) -> None:
    await rig.load("x", "1")
    await rig.load("y", "1")
    with pytest.raises(BadRequest, match="max_loras"):
        await rig.load("z", "1")
    with rig.adapters.using(rig.adapters.get("x")):
        await rig.adapters.unload("x")
        await rig.load("z", "1")
        with pytest.raises(BadRequest, match="max_loras"):
            await rig.load("x", "1")


async def test_loads_of_one_name_at_the_same_time(rig: Rig) -> None:
    results = await asyncio.gather(
        rig.load("x", "1"), rig.load("x", "2"), rig.load("x", "3"), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), BadRequest, BadRequest]
    assert len(rig.store.installed) == 1


async def test_a_caller_that_hangs_up_leaves_no_weights_behind(rig: Rig) -> None:
    rig.steps.gate.clear()
    task = asyncio.create_task(rig.load("x", "1"))
    await rig.steps.came.wait()  # it waits for the engine
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    rig.steps.gate.set()
    await rig.load("y", "1")  # after it, since loads happen one by one
    assert {one.info.name for one in rig.adapters} == {"x", "y"}
    assert len(rig.store.installed) == 2


@pytest.mark.parametrize("fault", ["no folder", "no name", "dead engine"])
async def test_a_load_that_fails_when_its_caller_has_left_ends_quietly(
    rig: Rig, fault: str
) -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: unhandled.append(told))
    rig.steps.gate.clear()
    first = asyncio.create_task(rig.load("x", "1"))
    await asyncio.sleep(0)
    folder = rig.folder / "none" if fault == "no folder" else write_fake(rig.folder / "z", "1")
    name = "base" if fault == "no name" else "z"
    left = asyncio.create_task(rig.adapters.load(name, str(folder)))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    await rig.steps.came.wait()  # the first has passed the engine's door
    rig.steps.dead = fault == "dead engine"
    rig.steps.gate.set()
    await first
    with pytest.raises(ModelNotFound):
        await rig.adapters.unload("y")  # after it, since these happen one by one
    gc.collect()
    assert unhandled == []
    assert [one.info.name for one in rig.adapters] == ["x"]


async def test_a_dead_engine_serves_no_adapter(rig: Rig) -> None:
    rig.steps.dead = True
    with pytest.raises(InternalError):
        await rig.load("x", "1")
    assert rig.adapters.served() == ()
    assert rig.changes == 0


async def test_unloading_twice(rig: Rig) -> None:
    await rig.load("x", "1")
    await rig.adapters.unload("x")
    with pytest.raises(ModelNotFound):
        await rig.adapters.unload("x")
    rig.steps.step()
    assert rig.store.installed == {}
    assert rig.changes == 2


@pytest.mark.parametrize("value", ["", " ", "null", "1", '"LORA"', "[" * 10_000, '{"r": NaN}'])
def test_any_bytes_are_refused_with_a_reason(value: str) -> None:
    with pytest.raises(AdapterRefused):
        read_config(value.encode())
