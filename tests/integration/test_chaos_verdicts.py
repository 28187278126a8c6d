"""What ``bench/chaos.py`` and ``bench/soak.py`` call lost or growth: they must be able to fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rig import DONE, ROLE, STOP, delta, event

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from chaoslab import verdict
from soak import growth

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


@pytest.mark.parametrize("place", range(3))
def test_growth_is_found_in_each_figure_and_noise_is_not(place: int) -> None:
    def rows(last: float) -> list[tuple[float, ...]]:
        made = [[100.0, 100.0, 100.0, 3.0] for _ in range(16)]
        for row in made[12:]:
            row[place] = last
        return [tuple(row) for row in made]

    assert growth(rows(104.0)) == []
    assert growth(rows(50.0)) == []
    assert len(growth(rows(112.0))) == 1
    assert growth(rows(112.0)[:3]) == ["fewer than four samples"]
