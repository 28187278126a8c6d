"""How many a worker serves at once, and what that says about the wait of one more."""

from __future__ import annotations

from collections import Counter

import pytest
from policykit import view
from routerkit import Rig, ok

from gateway.routing.places import FEWEST, ServiceTimes, place_waits
from shared.load import WorkerLoad
from shared.types import WorkerId


def waits(
    *inflight: int, service_s: float = 1.0, at_once: int = FEWEST, decoding: int = 0
) -> list[float]:
    fields = {"service_s": service_s, "at_once": at_once, "decoding": decoding}
    return place_waits([view(f"w{n}", inflight=n_, **fields) for n, n_ in enumerate(inflight)])


def test_nobody_waits_where_all_have_about_as_many() -> None:
    for count in (0, 3, 40, 4000):
        assert waits(*[count] * 4) == [0.0] * 4
    assert waits(1000) == [0.0], "a pool of one"
    assert waits() == []


def test_who_has_far_more_than_the_others_keeps_them_waiting_and_nobody_else_does() -> None:
    buried, *others = waits(40, 2, 2, 2)
    assert others == [0.0] * 3
    assert buried == pytest.approx((41 - (1.25 * 2 + 2)) / 4)
    assert waits(60, 2, 2, 2)[0] > buried
    assert waits(40, 2, 2, 2, service_s=3.0)[0] == pytest.approx(3 * buried)
    assert waits(40, 2, 2, 2, at_once=8)[0] == pytest.approx((41 - 8) / 8)
    assert waits(40, 2, 2, 2, at_once=41)[0] == 0.0, "so many were served side by side"
    assert waits(60, 22, 22, 22, decoding=20)[0] == pytest.approx(buried), "those have a place"
    assert min(waits(21, 21, 21, 0)[:3]) > 0.0 == waits(21, 21, 21, 0)[3], "three of four have all"
    assert waits(40, 2, 2, 2, service_s=0.0) == [0.0] * 4, "nothing is known"


def test_times_and_places_are_those_of_a_pool() -> None:
    times = ServiceTimes()
    assert times.seconds("m") == 0.0
    for _ in range(40):
        times.observe("m", 1.0)
    times.observe("m", 9.0)
    assert 1.0 < times.seconds("m") < 2.0
    times.served_at_once("m", 30)
    times.served_at_once("m", 20)
    assert times.at_once("m") == 30
    assert times.at_once("other") == FEWEST


@pytest.mark.parametrize("how", ["streamed", "whole", "told"])
def test_what_is_served_side_by_side_is_no_queue(how: str) -> None:
    rig = Rig(workers=1, events=False)
    hot = rig.prompt(100)
    leases = [rig.begin(hot) for _ in range(12)]
    assert rig.route(hot).order[0].candidate.worker.at_once == FEWEST
    rig.now += 1.0
    if how == "streamed":
        for one in leases:
            one.first_token(rig.now)
    elif how == "whole":
        leases[-1].finish(ok(1601, None), rig.now)
    else:
        rig.router.apply_load(WorkerId("w1"), WorkerLoad(running=12), rig.now)
    assert all(one.candidate.worker.at_once == 12 for one in rig.route(hot).order)


def test_a_queue_for_places_does_not_make_requests_look_long() -> None:
    """Four places, forty requests of a second each: the last take ten, and still one is one."""
    rig = Rig(workers=1, events=False)
    leases = [rig.begin(rig.prompt(1)) for _ in range(40)]
    for four in range(0, 40, 4):
        rig.now += 1.0
        for lease in leases[four : four + 4]:
            lease.finish(ok(17, None), rig.now)
    service_s = rig.route(rig.prompt(1)).chosen.candidate.worker.service_s
    assert service_s == pytest.approx(1.0, rel=0.25)


def test_a_burst_that_nobody_streams_does_not_queue_at_the_holder() -> None:
    rig = Rig(events=False)
    hot = rig.prompt(125)
    for _ in range(2):
        lease = rig.begin(hot)
        rig.now += 0.2
        lease.finish(ok(2001, None), rig.now)
    counts = Counter(str(rig.begin(hot).worker) for _ in range(64))
    assert len(counts) == 4
    assert max(counts.values()) <= 40, counts
