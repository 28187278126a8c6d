"""What ``bench/chaos.py`` and ``bench/soak.py`` call lost or growth: they must be able to fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rig import DONE, ROLE, STOP, delta, event

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from chaoslab import verdict
from soak import Sample, growth, strays

from shared.rediskeys import RedisKeys
from shared.types import Epoch, WorkerId

GOOD = ROLE + delta("a") + STOP
ERROR = {"error": {"message": "the worker left", "type": "server_error"}}


@pytest.mark.parametrize(
    ("status", "data", "stream", "expected"),
    [
        (200, b'{"choices":[{}]}', False, "ok"),
        (200, GOOD + DONE, True, "ok"),
        (200, GOOD + event(ERROR), True, "told"),
        (503, json.dumps(ERROR).encode(), False, "told"),
        (503, json.dumps(ERROR).encode(), True, "told"),
        (502, b"<html>", False, "lost"),
        (502, b'{"error":"x"}', True, "lost"),
        (200, b'{"choices":[]}', False, "lost"),
        (200, b'{"choices":[{}', False, "lost"),
        (200, json.dumps(ERROR).encode(), False, "lost"),
        (200, GOOD, True, "lost"),
        (200, b"", True, "lost"),
        (200, b"data: {", True, "lost"),
        (200, b'{"choices":[{}]}', True, "lost"),
    ],
)
def test_verdicts(status: int, data: bytes, stream: bool, expected: str) -> None:
    assert verdict(status, data, stream=stream).split(":")[0] == expected


PERIOD, EVERY, N_ROUNDS = 90.0, 10.0, 9
KEYS_IN_A_ROUND = (42.0, 59.0, 59.0, 25.0, 42.0, 42.0, 42.0, 42.0, 42.0)
"""A killed worker's former checkpoint, a flush, and what heals afterwards."""


def rows(name: str = "", factor: float = 1.0, *, phase: int = 0) -> list[Sample]:
    """Samples of whole rounds; in the last quarter of them one figure is larger."""
    found = []
    for turn in range(int(N_ROUNDS * PERIOD / EVERY)):
        held = {"rss_mib": 80.0, "fds": 40.0, "redis_keys": KEYS_IN_A_ROUND[(turn + phase) % 9]}
        if name and turn * EVERY >= (N_ROUNDS - 1) * PERIOD * 0.75:
            held[name] *= factor
        found.append(Sample(at=turn * EVERY, in_flight=3.0, **held))
    return found


ROUNDS = [number * PERIOD for number in range(N_ROUNDS)]


@pytest.mark.parametrize("phase", range(9))
def test_what_swings_with_the_faults_is_no_growth(phase: int) -> None:
    for many in range(3, N_ROUNDS):
        assert growth(rows(phase=phase), ROUNDS[:many]) == []


@pytest.mark.parametrize("name", ["rss_mib", "fds", "redis_keys"])
def test_growth_is_found_in_each_figure_and_noise_is_not(name: str) -> None:
    assert growth(rows(name, 1.04), ROUNDS) == []
    assert growth(rows(name, 0.5), ROUNDS) == []
    [found] = growth(rows(name, 1.3), ROUNDS)
    assert name in found
    assert "too short" in growth(rows(), ROUNDS[:2])[0]
    assert "too few" in growth([], ROUNDS)[0]


def test_keys_that_would_stay_or_belong_to_nothing() -> None:
    keys = RedisKeys("headwater")
    here, gone = WorkerId("127.0.0.1:8100"), WorkerId("127.0.0.1:8999")
    old, new = Epoch(1), Epoch(2)
    good = [keys.members(3), keys.log(3), keys.learned(0), keys.worker(here), keys.gateways()]
    good += [keys.bookings("gw-a1"), keys.ledger(), keys.limits("key1")]
    for epoch in (old, new):
        good += [keys.manifest(here, epoch), keys.chunk(here, epoch, 15)]
        good += [keys.host_chunk(here, epoch, 0)]
    assert strays(dict.fromkeys(good, 5000), {here}) == []
    for name in good:
        assert strays({name: -1}, {here}) == [f"{name} has no time to live"]
    for name in (keys.worker(gone), keys.chunk(gone, new, 1), "other", f"{keys.log(1)}:x"):
        assert strays({name: 5000}, {here}) == [f"{name} belongs to nothing"]
