"""Many time limits, one timer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.deadlines import Deadlines


class Loop:
    """A clock that is moved by hand, and the timers that are set on it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, call: Callable[..., None], *given: Any) -> Timer:
        timer = Timer(at, lambda: call(*given), self)
        self.timers.append(timer)
        return timer

    def move(self, to: float) -> None:
        while due := [timer for timer in self.timers if timer.at <= to]:
            first = min(due, key=lambda timer: timer.at)
            self.timers.remove(first)
            self.now = max(self.now, first.at)
            first.call()
        self.now = to


class Timer:
    def __init__(self, at: float, call: Callable[[], None], loop: Loop) -> None:
        self.at, self.call, self._loop = at, call, loop

    def cancel(self) -> None:
        self._loop.timers.remove(self)


@pytest.fixture
def loop() -> Any:
    return Loop()


@pytest.fixture
def late() -> list[str]:
    return []


@pytest.fixture
def deadlines(late: list[str]) -> Deadlines[str]:
    return Deadlines(late.append)


def test_who_is_late_is_told_in_time_and_once(deadlines, late, loop) -> None:
    deadlines.add("long", 60.0, loop)
    deadlines.add("short", 1.0, loop)
    deadlines.add("longer", 61.0, loop)
    loop.move(100.9)
    assert late == []
    loop.move(101.0)
    assert late == ["short"]
    loop.move(500.0)
    assert late == ["short", "long", "longer"]
    assert loop.timers == []


def test_who_is_done_is_never_late(deadlines, late, loop) -> None:
    deadlines.add("a", 1.0, loop)
    deadlines.add("b", 2.0, loop)
    deadlines.done("a")
    deadlines.done("a")
    deadlines.done("unknown")
    loop.move(101.5)
    assert late == []
    loop.move(110.0)
    assert late == ["b"]


def test_one_timer_is_set_however_many_come_and_go(deadlines, loop) -> None:
    for number in range(1000):
        deadlines.add(str(number), 600.0, loop)
        deadlines.done(str(number))
        loop.now += 0.01
    assert len(loop.timers) == 1


def test_who_comes_after_the_timer_found_nobody_is_told_as_well(deadlines, late, loop) -> None:
    deadlines.add("a", 1.0, loop)
    deadlines.done("a")
    loop.move(200.0)
    assert loop.timers == []
    deadlines.add("b", 1.0, loop)
    loop.move(201.0)
    assert late == ["b"]


def test_who_is_late_may_end_others(late, loop) -> None:
    deadlines: Deadlines[str] = Deadlines(lambda item: (late.append(item), deadlines.done("b")))
    deadlines.add("a", 1.0, loop)
    deadlines.add("b", 2.0, loop)
    loop.move(300.0)
    assert late == ["a"]
