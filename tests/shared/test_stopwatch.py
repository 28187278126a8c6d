"""The tests' own clock: forgives what the machine took, and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
from stopwatch import Limit, Stopwatch, look


def spin(seconds: float) -> None:
    """Compute for so many seconds of CPU."""
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass


@pytest.mark.parametrize("work", [time.sleep, spin], ids=["sleeps", "computes"])
def test_own_time_counts(work, monkeypatch) -> None:
    monkeypatch.setattr("stopwatch._stolen_s", lambda: 0.0)  # what a host takes is its business
    clock = Stopwatch()
    work(0.2)
    assert clock.seconds() >= 0.19


def test_what_the_host_takes_does_not(monkeypatch) -> None:
    stolen = [7.0]
    monkeypatch.setattr("stopwatch._stolen_s", lambda: stolen[0])
    clock, begun = Stopwatch(), time.monotonic()
    time.sleep(0.2)
    stolen[0] += 0.15
    assert clock.seconds() <= time.monotonic() - begun - 0.15


def test_waiting_for_a_cpu_does_not() -> None:
    """Six spinning processes on one CPU: each gets a sixth of it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [multiprocessing.get_context("fork").Process(target=spin, args=(5,)) for _ in range(5)]
    try:
        for other in others:
            other.start()
        clock, begun = Stopwatch(), time.monotonic()
        spin(0.3)
        took, shown = time.monotonic() - begun, clock.seconds()
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.join()
    assert took > 0.6
    assert shown < 0.6 * took


def test_a_limit_is_over_when_that_time_has_passed() -> None:
    limit = Limit(0.2)
    assert not limit.over()
    time.sleep(0.25)
    assert limit.over()


def test_a_limit_leaves_out_the_wait_for_a_cpu_and_ends_nevertheless(monkeypatch) -> None:
    waits, now = [0.0], [100.0]
    monkeypatch.setattr("stopwatch._known", {})
    monkeypatch.setattr("stopwatch._waited", lambda: {1: waits[0], 2: waits[0]})
    monkeypatch.setattr("stopwatch._stolen_s", lambda: 0.0)
    monkeypatch.setattr("stopwatch.time.monotonic", lambda: now[0])
    limit = Limit(1.0)
    now[0], waits[0] = 101.5, 0.4
    assert not limit.over()
    now[0] = 101.9
    assert limit.over()
    # Two processes that wait all the while: more than the time there is.
    now[0], waits[0] = 109.0, 9.0
    assert not limit.over()
    now[0] = 110.0
    assert limit.over()


def test_the_waits_of_a_process_that_has_ended_are_left_out_if_they_were_seen(monkeypatch) -> None:
    waits, now = {1: 0.0, 2: 5.0}, [100.0]
    monkeypatch.setattr("stopwatch._known", {3: (70.0, 99.0)})
    monkeypatch.setattr("stopwatch._waited", lambda: dict(waits))
    monkeypatch.setattr("stopwatch._stolen_s", lambda: 0.0)
    monkeypatch.setattr("stopwatch.time.monotonic", lambda: now[0])
    clock = Stopwatch()
    now[0], waits[2] = 102.0, 6.5
    look()
    now[0], waits = 103.0, {1: 0.25}
    assert clock.seconds() == pytest.approx(3.0 - 1.5 - 0.25)
