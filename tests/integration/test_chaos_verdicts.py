"""What ``bench/chaos.py``, ``soak.py`` and ``sidechannel.py`` find: they must be able to fail."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest
from rig import DONE, ROLE, STOP, delta, event

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import sidechannel
from chaoslab import Load, verdict
from sidechannel import Trial
from soak import Sample, growth, strays

from shared.rediskeys import RedisKeys
from shared.types import Epoch, WorkerId

GOOD = ROLE + delta("a") + STOP
REST: dict[str, tuple[str, ...]] = {
    "bookings": ("gw-b423822a949930d4",),
    "offered": ("gw-b423822a949930d4",),
    "drains": (),
    "gateways": (),
    "ledger": (),
    "limits": ("some.tenant-1",),
    "gave": ("0af3",),
}
"""What keys there are beside those of workers."""
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


async def test_load_waits_where_too_many_have_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that gets slower is not asked for ever more; nothing that was sent is dropped."""
    load = Load(lambda: "", 1e9, most=3)
    running: list[int] = [0]

    async def one(session: object, rng: object) -> None:
        load.counts["requests"] += 1
        load.ends = load.counts["requests"] >= 20
        running.append(running[-1] + 1)
        for _ in range(50):
            await asyncio.sleep(0)
        running.append(running[-1] - 1)

    monkeypatch.setattr(load, "_one", one)
    await load.run()
    assert max(running) == 3
    assert running[-1] == 0
    assert load.counts["held"] > 0


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
    good = [keys.members(3), keys.log(3), keys.learned(0), keys.worker(here)]
    for epoch in (old, new):
        good += [keys.manifest(here, epoch), keys.chunk(here, epoch, 15)]
        good += [keys.host_chunk(here, epoch, 0)]
    good += [getattr(keys, name)(*values) for name, values in REST.items()]
    of_workers = {"members", "worker", "log", "learned", "manifest", "chunk", "host_chunk"}
    named = {name for name in dir(RedisKeys) if not name.startswith("_")}
    known = {"shard_of", "shard_in", "deployment", "shards"}
    assert named - known == of_workers | set(REST), "all are asked"
    assert strays(dict.fromkeys(good, 5000), {here}) == []
    for name in good:
        assert strays({name: -1}, {here}) == [f"{name} has no time to live"]
    for name in (keys.worker(gone), keys.chunk(gone, new, 1), "other", f"{keys.log(1)}:x"):
        assert strays({name: 5000}, {here}) == [f"{name} belongs to nothing"]


def trials(faster_s: float, tokens: float, *, many: int = 60, seed: int = 1) -> list[Trial]:
    """What a spy sees on a noisy machine if a hit is so much faster."""
    rng = random.Random(seed)
    found = []
    for number in range(many):
        sent = number % 2 == 0
        seconds = 0.12 + rng.expovariate(20) - (faster_s if sent else 0.0)
        found.append(Trial(sent, seconds, tokens * sent, tokens * sent))
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidechannel, "SHUFFLES", 1500)


def test_what_a_spy_sees_is_told_from_chance() -> None:
    assert (
        sum(bool(sidechannel.verdict(trials(0, 0, seed=n), isolated=True)) for n in range(8)) == 0
    )
    assert sidechannel.verdict(trials(0.11, 800), isolated=False) == []


@pytest.mark.parametrize(("faster_s", "tokens", "names"), [
    (0.11, 0, ["seconds"]),
    (0.08, 0, ["seconds"]),
    (0.0, 16, ["cached_tokens", "matched_tokens"]),
])  # fmt: skip
def test_a_leak_of_any_kind_is_found(faster_s: float, tokens: float, names: list[str]) -> None:
    wrong = sidechannel.verdict(trials(faster_s, tokens), isolated=True)
    assert [line.split()[0] for line in wrong] == names


def test_a_test_that_is_blind_or_too_short_says_so() -> None:
    assert len(sidechannel.verdict(trials(0, 0), isolated=False)) == 3
    assert "too few" in sidechannel.verdict(trials(0, 0, many=14), isolated=True)[0]
    assert sidechannel.area([1, 2], [0, 2]) == 0.625
