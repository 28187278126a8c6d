"""What a prefix's branches and a pool's load say about recomputing."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ghosts import GhostMemory
from gateway.routing.branches import NOBODY, Branches
from gateway.routing.pressure import NOTHING, Flow, Flows, Pressure
from shared.blocks import GRANULE
from shared.types import BlockKey, WorkerId


class Served:
    """Branches, and a memory of what was asked before."""

    def __init__(self, max_keys: int = 10_000) -> None:
        self.ghosts = GhostMemory(100_000)
        self.branches = Branches(max_keys)

    def serve(self, keys: list[int]) -> None:
        known = [BlockKey(key) for key in keys]
        self.branches.asked(known, self.ghosts.seen(known))
        self.ghosts.remember(known)

    def shared(self, keys: list[int], known: int = 0) -> float:
        return self.branches.popularity([BlockKey(key) for key in keys]).shared_tokens(known)


def test_a_conversation_that_grows_makes_no_branch() -> None:
    served = Served()
    talk = list(range(1, 200))
    for turn in range(10, 200, 10):
        served.serve(talk[:turn])
    served.serve(talk[:100])
    assert served.shared(talk) == 0.0
    assert served.branches.popularity([BlockKey(7)]) is NOBODY


def test_a_system_prompt_counts_what_goes_on_from_it() -> None:
    served = Served()
    system = list(range(1, 11))
    for n in range(1, 5):
        served.serve([*system, 100 * n, 100 * n + 1])
        share = 1.0 - 1.0 / n**2
        assert served.shared([*system, 999]) == pytest.approx(share * 10 * GRANULE)
    assert served.shared([*system, 100, 101], 8 * GRANULE) == pytest.approx(30.0)
    assert served.shared([*system, 100, 101], 10 * GRANULE) == 0.0
    served.serve([*system, 100, 101, 102])
    assert served.shared([*system, 999]) == pytest.approx(150.0), "a later turn adds nothing"


def test_memory_is_bounded_and_popular_prefixes_outlive_others() -> None:
    served = Served(max_keys=64)
    rng = Random(3)
    popular = [1, 2, 3]
    for _ in range(200):
        served.serve([*popular, rng.getrandbits(60)])
        once = [rng.getrandbits(60) for _ in range(5)]
        served.serve([*once, 5])
        served.serve([*once, 6])
        assert len(served.branches) <= 64 + 5
    assert served.shared(popular) > 0.9 * 3 * GRANULE


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40))
def test_popularity_falls_along_every_path(prompts: list[list[int]]) -> None:
    served = Served(max_keys=8)
    for prompt in prompts:
        chained = [hash(tuple(prompt[: at + 1])) for at in range(len(prompt))]
        served.serve(chained)
        runs = served.branches.popularity([BlockKey(key) for key in chained]).runs
        shares = [share for _, _, share in runs]
        assert shares == sorted(shares, reverse=True)
        assert all(0.0 < share < 1.0 for share in shares)
        assert [start for start, _, _ in runs] == [0, *(end for _, end, _ in runs)][: len(runs)]


def test_pressure_is_the_share_of_the_pools_time() -> None:
    pressure = Pressure()
    assert pressure.share("m", 4, 0.0) == 0.0
    for step in range(3000):
        pressure.book("m", WorkerId(f"w{step % 2}"), 0.2, step * 0.1)
    assert pressure.share("m", 4, 300.0) == pytest.approx(0.5, abs=0.01)
    assert pressure.share("m", 8, 300.0) == pytest.approx(0.25, abs=0.01)
    assert pressure.share("other", 4, 300.0) == 0.0
    assert pressure.share("m", 0, 300.0) == 0.0
    assert pressure.share("m", 4, 400.0) < 0.03, "and is forgotten"


def test_what_a_worker_was_offered_is_its_own() -> None:
    pressure, busy, idle = Pressure(), WorkerId("busy"), WorkerId("idle")
    for step in range(6000):
        pressure.book("m", busy, 0.05, step * 0.1)
    seen = pressure.offered(busy, 600.0)
    assert (seen.bound_per_s, seen.bound_busy) == pytest.approx((10.0, 0.5), rel=0.02)
    assert seen.mean_wait_s == pytest.approx(10.0 * 0.05**2 / (2 * 0.5), rel=0.05)
    assert pressure.offered(busy, 660.0).bound_busy == pytest.approx(0.5 / 2.718, rel=0.02)
    assert pressure.offered(idle, 600.0) == NOTHING
    pressure.forget(busy)
    assert pressure.offered(busy, 600.0) == NOTHING
    assert pressure.share("m", 4, 600.0) > 0.1, "the pool's load stays"


@pytest.mark.parametrize("gateways", [2, 4, 7])
def test_several_gateways_see_the_load_that_one_would_see(gateways: int) -> None:
    alone, parts = Pressure(), [Pressure() for _ in range(gateways)]
    rng, workers = Random(5), [WorkerId("a"), WorkerId("b")]
    for step in range(6000):
        worker, seconds, bound = rng.choice(workers), rng.uniform(0.0, 0.12), rng.random()
        for pressure in (alone, rng.choice(parts)):
            pressure.book("m", worker, seconds, step * 0.1, bound=bound)
    for part in parts:
        for number, other in enumerate(parts):
            if other is not part:
                part.hear(f"g{number}", Flows())
                part.hear(f"g{number}", other.flows(600.0))
        assert part.share("m", 2, 600.0) == pytest.approx(alone.share("m", 2, 600.0))
        for worker in workers:
            seen, truth = part.offered(worker, 600.0), alone.offered(worker, 600.0)
            assert seen.bound_per_s == pytest.approx(truth.bound_per_s)
            assert seen.bound_busy == pytest.approx(truth.bound_busy)
            assert seen.mean_wait_s == pytest.approx(truth.mean_wait_s)
    own = Pressure()
    own.hear("g", alone.flows(600.0))
    assert own.offered(workers[0], 0.0).bound_busy > 0.1, "known before it sends anything itself"
    assert own.share("m", 2, 0.0) > 0.1
    own.hear("g", None)
    assert own.offered(workers[0], 0.0) == NOTHING
    assert own.share("m", 2, 0.0) == 0.0


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_what_cannot_be_is_not_believed_of_another_gateway(rate: float) -> None:
    pressure, worker = Pressure(), WorkerId("w")
    pressure.hear("g", Flows({"w": Flow(rate, rate, rate, rate)}, {"m": rate}))
    seen = pressure.offered(worker, 0.0)
    assert (seen.bound_per_s, seen.bound_busy, seen.mean_wait_s) == (0.0, 0.0, 0.0)
    assert pressure.share("m", 1, 0.0) == 0.0


def test_who_could_go_elsewhere_waits_behind_others_half_as_likely() -> None:
    pressure, home, free = Pressure(), WorkerId("home"), WorkerId("free")
    for step in range(6000):
        pressure.book("m", home, 0.05, step * 0.1, bound=1.0)
        pressure.book("m", free, 0.05, step * 0.1, bound=0.0)
    at_home, elsewhere = pressure.offered(home, 600.0), pressure.offered(free, 600.0)
    assert elsewhere.bound_per_s == pytest.approx(at_home.bound_per_s / 2)
    assert elsewhere.bound_busy == pytest.approx(at_home.bound_busy / 2)
    assert elsewhere.mean_wait_s == at_home.mean_wait_s, "the queue itself is the same"


def test_a_queue_that_grows_without_end_still_has_a_mean_wait() -> None:
    pressure, worker = Pressure(), WorkerId("w")
    for step in range(1000):
        pressure.book("m", worker, 3.0, float(step))
    seen = pressure.offered(worker, 1000.0)
    assert seen.bound_busy == 0.9
    assert seen.mean_wait_s == pytest.approx(9.0 / 0.2, rel=0.05)


def test_a_worker_that_joins_counts_as_the_others_until_it_shows() -> None:
    pressure, old, new = Pressure(), [WorkerId("a"), WorkerId("b")], WorkerId("new")
    pressure.welcome(new, old, 0.0)
    assert pressure.offered(new, 0.0) == NOTHING, "nobody knows anything yet"
    for step in range(6000):
        pressure.book("m", old[step % 2], 0.1, step * 0.1)
    pressure.welcome(new, old, 600.0)
    assert pressure.offered(new, 600.0).bound_per_s == pytest.approx(5.0, rel=0.05)
    assert pressure.offered(new, 600.0).bound_busy == pytest.approx(0.5, rel=0.05)
    pressure.welcome(old[0], [new], 600.0)
    assert pressure.offered(old[0], 600.0).bound_per_s == pytest.approx(5.0, rel=0.05), (
        "known already"
    )
    assert pressure.offered(new, 900.0).bound_per_s < 0.1
