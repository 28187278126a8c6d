"""How many a worker serves at once, and what that says about the wait of one more."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from routerkit import Rig, ok

from gateway.routing.places import FEWEST, ServiceTimes, place_wait_s
from shared.load import WorkerLoad
from shared.types import WorkerId


def test_nobody_waits_within_what_was_seen_and_more_wait_longer_beyond() -> None:
    waits = [place_wait_s(1.0, 4, others) for others in range(64)]
    assert waits[:4] == [0.0] * 4
    assert all(here < there for here, there in pairwise(waits[4:]))
    for others, wait in enumerate(waits[4:], 4):
        assert wait < (others + 1 - 4) / 4, "as if no more places than these were possible"
    assert place_wait_s(2.0, 8, 20) == pytest.approx(2 * place_wait_s(1.0, 8, 20))


def test_service_times_are_shrunk_to_the_pool_and_forgotten_with_it() -> None:
    times, a, b = ServiceTimes(), WorkerId("a"), WorkerId("b")
    assert times.seconds("m", a) == 0.0
    for _ in range(40):
        times.observe("m", a, 1.0)
    times.observe("m", b, 9.0)
    assert 1.0 < times.seconds("m", b) < 3.0
    times.served_at_once("m", 30)
    assert times.at_once("m") == 30
    assert times.at_once("other") == FEWEST
    for worker in (a, b):
        times.forget("m", worker)
    assert times.seconds("m", a) == 0.0
    assert times.at_once("m") == FEWEST


@pytest.mark.parametrize("how", ["streamed", "whole", "told"])
def test_what_is_served_side_by_side_is_no_queue(how: str) -> None:
    rig = Rig(workers=1)
    leases = [rig.begin(rig.prompt(1)) for _ in range(12)]
    rig.now += 1.0
    assert rig.route(rig.prompt(1)).chosen.parts["wait"] > 0.3, "the open ones have lasted"
    if how == "streamed":
        for lease in leases:
            lease.first_token(rig.now)
    elif how == "whole":
        leases[-1].finish(ok(), rig.now)
    else:
        load = WorkerLoad(running=13)
        rig.router.apply_load(WorkerId("w1"), load, rig.now)
    wait = rig.route(rig.prompt(1)).chosen.candidate.worker.place_wait_s
    assert wait < 0.02, wait


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
