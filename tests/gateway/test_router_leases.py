"""Bookings, health, ejection and refusal (cases B04, B05, B12)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from policykit import query, view
from routerkit import Rig, failed, ok

from gateway.deciding import _bound
from gateway.decision import Overlap, Route
from gateway.records import Outcome
from gateway.routing.base import Candidate, Scored, WorkerState
from shared.errors import ModelNotFound, NoCapacity
from shared.types import WorkerId


def state_of(rig: Rig, name: str) -> WorkerState:
    return next(item.state for item in rig.router.workers(rig.now) if item.id == name)


def test_a_lease_is_released_exactly_once() -> None:
    rig = Rig(workers=1)
    lease = rig.begin(rig.prompt(10))
    other = rig.begin(rig.prompt(10))
    assert rig.inflight() == {"w1": 2}
    lease.first_token(rig.now)
    first = lease.finish(ok(), rig.now + 1)
    assert lease.finish(failed(), rig.now + 2) is first
    lease.first_token(rig.now + 3)
    assert rig.inflight() == {"w1": 1}
    other.finish(failed(499, Outcome.CLIENT_GONE), rig.now)
    assert rig.inflight() == {"w1": 0}
    assert rig.router.bookings(rig.now) == {}


def test_expected_wait_shrinks_with_time_and_ends_with_the_first_token() -> None:
    rig = Rig(workers=1, prefill_s_per_token=1e-3)
    lease = rig.begin(rig.prompt(100))

    def wait() -> float:
        return rig.route(rig.prompt(1)).chosen.parts["wait"]

    booked = wait()
    assert booked == pytest.approx(1.6, rel=0.1)
    rig.now += 1.0
    assert wait() == pytest.approx(booked - 1.0, rel=0.1)
    rig.now += 5.0
    assert wait() == pytest.approx(booked), "overdue work may be stuck: it counts in full"
    lease.first_token(rig.now)
    assert wait() == 0.0
    assert rig.inflight() == {"w1": 1}


class Speaker:
    """An answer that has said something last at this time."""

    def __init__(self, last_at: float) -> None:
        self.last_at = last_at


def test_answers_that_all_fall_silent_count_as_a_wait() -> None:
    """B02: a worker that stops in the midst of its answers is no idle one."""
    rig = Rig(workers=1)
    speakers = [Speaker(rig.now), Speaker(rig.now), Speaker(rig.now), Speaker(rig.now)]
    for speaker in speakers:
        rig.begin(rig.prompt(1)).first_token(rig.now, speaker)
    waits = []
    for passed in (0.05, 1.0, 1.0):
        rig.now += passed
        waits.append(rig.route(rig.prompt(1)).chosen.parts["wait"])
    silence_s = 2.05 - 8 * 0.01
    assert waits == [0.0, pytest.approx(0.75 * (silence_s - 1)), pytest.approx(0.75 * silence_s)]
    told = rig.router.bookings(rig.now)["w1"]
    assert told.prefill_s == pytest.approx(waits[-1]), "other gateways are told"
    speakers[2].last_at = rig.now
    rig.now += 0.06  # views last for a moment
    assert rig.route(rig.prompt(1)).chosen.parts["wait"] == 0.0, "one that speaks shows it alive"


@pytest.mark.parametrize("others", [[], [None]], ids=["alone", "one that cannot be followed"])
def test_one_answer_may_be_silent_for_its_own_reasons(others: list[Speaker | None]) -> None:
    rig = Rig(workers=1)
    for speaker in [Speaker(rig.now), *others]:
        rig.begin(rig.prompt(1)).first_token(rig.now, speaker)
    rig.now += 60.0
    assert rig.route(rig.prompt(1)).chosen.parts["wait"] == 0.0


def test_a_prefill_under_way_excuses_silence() -> None:
    rig = Rig(workers=1, prefill_s_per_token=1e-3)
    for _ in range(2):
        rig.begin(rig.prompt(1)).first_token(rig.now, Speaker(rig.now))
    rig.begin(rig.prompt(100))
    rig.now += 1.0
    assert rig.route(rig.prompt(1)).chosen.parts["wait"] == pytest.approx(0.6, rel=0.1)


def test_queued_prefills_add_up() -> None:
    rig = Rig(workers=1)
    waits = []
    for _ in range(4):
        waits.append(rig.route(rig.prompt(50)).chosen.parts["wait"])
        rig.begin(rig.prompt(50))
    steps = [later - earlier for earlier, later in pairwise(waits)]
    assert waits[0] == 0.0
    assert min(steps) == pytest.approx(max(steps), rel=0.01)
    assert min(steps) > 0.05


def test_a_flapping_worker_never_counts_below_zero() -> None:
    rig = Rig(workers=4)
    old = [rig.begin(rig.prompt(5)) for _ in range(40)]
    rig.router.set_health(WorkerId("w1"), False, rig.now, "refused")
    rig.router.set_health(WorkerId("w1"), True, rig.now, "")
    rig.router.leave(WorkerId("w1"), rig.now, "lease expired")
    rig.join("w1")
    assert rig.inflight()["w1"] == sum(lease.worker == "w1" for lease in old), "same incarnation"
    rig.router.leave(WorkerId("w1"), rig.now, "lease expired")
    rig.join("w1", epoch=7)
    assert rig.inflight()["w1"] == 0, "a new incarnation does not run the old attempts"
    for lease in old:
        lease.finish(ok(), rig.now)
        assert min(rig.inflight().values()) >= 0
    assert set(rig.inflight().values()) == {0}
    for _ in range(40):
        rig.begin(rig.prompt(5))
    assert 7 <= rig.inflight()["w1"] <= 13


def test_a_restart_in_place_keeps_its_leases_until_they_end() -> None:
    rig = Rig(workers=1)
    lease = rig.begin(rig.prompt(5))
    rig.join("w1", epoch=2)
    assert rig.inflight() == {"w1": 1}
    lease.finish(failed(), rig.now)
    assert rig.inflight() == {"w1": 0}


def test_a_fast_failer_does_not_look_idle() -> None:
    rig = Rig(workers=2, prefill_s_per_token=1e-3)
    record = rig.begin(rig.prompt(100))
    bad = record.worker
    record.finish(failed(), rig.now + 0.001)
    rig.now += 0.002
    assert rig.inflight()[bad] == 0
    for _ in range(5):
        assert rig.route(rig.prompt(10)).worker != bad
    assert rig.route(rig.prompt(10)).order[1].parts["wait"] > 1.0
    rig.now += 600
    assert rig.route(rig.prompt(10)).order[1].parts["wait"] == 0.0


def test_client_errors_never_trip_the_breaker() -> None:
    rig = Rig(workers=2)
    for status in (400, 404, 413, 422, 429):
        for _ in range(50):
            rig.begin(rig.prompt(1)).finish(failed(status, Outcome.CLIENT_ERROR), rig.now)
    assert {item.failure_rate for item in rig.router.workers(rig.now)} == {0.0}
    assert {item.state for item in rig.router.workers(rig.now)} == {WorkerState.READY}


def fail_on(rig: Rig, worker: str, times: int) -> None:
    for _ in range(times):
        decision = rig.route(rig.prompt(1), exclude=[n for n in rig.names if n != worker])
        rig.router.begin(decision, rig.now, attempt=1).finish(failed(), rig.now)


def test_three_failures_of_ten_eject_and_one_probe_decides() -> None:
    rig = Rig(workers=2)
    fail_on(rig, "w1", 2)
    assert state_of(rig, "w1") is WorkerState.READY
    fail_on(rig, "w1", 1)
    assert state_of(rig, "w1") is WorkerState.EJECTED
    assert all(rig.serve(rig.prompt(1)).worker == "w2" for _ in range(20))
    rig.now += 5.1
    only = [n for n in rig.names if n != "w1"]
    probe = rig.router.begin(rig.route(rig.prompt(1), exclude=only), rig.now, attempt=1)
    assert state_of(rig, "w1") is WorkerState.EJECTED, "one probe at a time"
    probe.finish(failed(), rig.now)
    rig.now += 5.1
    assert state_of(rig, "w1") is WorkerState.EJECTED, "the pause has doubled"
    rig.now += 5.0
    probe = rig.router.begin(rig.route(rig.prompt(1), exclude=only), rig.now, attempt=1)
    probe.first_token(rig.now)
    probe.finish(ok(), rig.now)
    assert state_of(rig, "w1") is WorkerState.READY


def test_a_probe_whose_client_left_decides_nothing() -> None:
    rig = Rig(workers=2)
    fail_on(rig, "w1", 3)
    rig.now += 5.1
    lease = rig.router.begin(rig.route(rig.prompt(1), exclude=["w2"]), rig.now, attempt=1)
    lease.finish(failed(499, Outcome.CLIENT_GONE), rig.now)
    assert state_of(rig, "w1") is WorkerState.READY, "the next request may probe"


def test_never_more_than_half_the_fleet_rests() -> None:
    rig = Rig(workers=4)
    for name in rig.names:
        fail_on(rig, name, 3)
    resting = [n for n in rig.names if state_of(rig, n) is WorkerState.EJECTED]
    assert len(resting) == 2
    alone = Rig(workers=1)
    fail_on(alone, "w1", 20)
    assert state_of(alone, "w1") is WorkerState.READY


def test_when_only_resting_workers_are_left_one_is_tried() -> None:
    rig = Rig(workers=2)
    fail_on(rig, "w1", 3)
    rig.router.set_health(WorkerId("w2"), False, rig.now, "refused")
    assert rig.route(rig.prompt(1)).worker == "w1"
    assert rig.router.ready() == (True, [])


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_what_failed_on_all_others_is_tried_on_those_that_rest(workers: int) -> None:
    rig = Rig(workers=workers)
    resting = rig.names[: workers // 2]
    for name in resting:
        fail_on(rig, name, 3)
    tried: list[str] = []
    for _ in rig.names:
        tried.append(rig.route(rig.prompt(1), exclude=tried).worker)
    assert set(tried[-len(resting) :]) == set(resting), "they are the last resort"
    assert len(set(tried)) == workers
    refused = rig.reject(rig.query(rig.prompt(1)), exclude=tried)
    assert refused.reason == "all_tried"


def test_a_very_late_first_token_is_a_failure_a_short_deadline_is_not() -> None:
    rig = Rig(workers=2)
    for _ in range(10):
        rig.begin(rig.prompt(1)).finish(failed(504, Outcome.DEADLINE), rig.now + 0.5)
    assert {item.failure_rate for item in rig.router.workers(rig.now)} == {0.0}
    rig.begin(rig.prompt(1)).finish(failed(504, Outcome.DEADLINE), rig.now + 60)
    assert sorted(item.failure_rate for item in rig.router.workers(rig.now)) == [0.0, 0.1]


def test_refusals_say_why() -> None:
    empty = Rig(workers=0)
    nobody = empty.reject(empty.query(empty.prompt(1)))
    assert (type(nobody.error), nobody.reason) == (NoCapacity, "no_worker")
    some = Rig(workers=1)
    unknown = some.reject(some.query(some.prompt(1), model="other"))
    assert (type(unknown.error), unknown.reason) == (ModelNotFound, "model_not_found")
    assert empty.router.ready() == (False, ["no worker has joined"])
    rig = Rig(workers=1)
    tried = rig.reject(rig.query(rig.prompt(1)), exclude={WorkerId("w1")})
    assert (type(tried.error), tried.reason) == (NoCapacity, "all_tried")
    rig.router.set_health(WorkerId("w1"), False, rig.now, "refused")
    down = rig.reject(rig.query(rig.prompt(1)))
    assert (str(down.error), down.reason) == ("No worker for 'm' is ready.", "no_worker")
    assert down.error.retry_after_s
    assert rig.router.ready() == (False, ["worker w1: refused"])
    assert rig.router.models() == ()
    with pytest.raises(KeyError):
        rig.router.decide(rig.query(rig.prompt(1)), rig.now, policy="nonsense")
    record = rig.router.reject_record(
        rig.query(rig.prompt(5)), "/v1/chat/completions", down.error, rig.now + 1, 5.0
    )
    record.flow.check()
    assert (record.outcome, record.status, record.attempt) == (Outcome.REJECTED, 503, 0)
    assert record.flow.prompt == 0


def test_begin_on_a_worker_that_has_left_is_refused() -> None:
    rig = Rig(workers=1)
    route = rig.route(rig.prompt(1))
    rig.router.leave(WorkerId("w1"), rig.now, "gone")
    with pytest.raises(LookupError):
        rig.router.begin(route, rig.now, attempt=1)


def test_unknown_workers_are_fine() -> None:
    rig = Rig(workers=1)
    rig.router.leave(WorkerId("nobody"), rig.now, "x")
    rig.router.set_health(WorkerId("nobody"), False, rig.now, "x")
    assert rig.router.worker_url(WorkerId("nobody")) is None
    assert rig.router.worker_url(WorkerId("w1")) == "http://w1"


def test_prefill_rates_are_learned_from_what_workers_show() -> None:
    rig = Rig(workers=2, prefill_s_per_token=1e-4)
    pace = {"w1": 1e-3, "w2": 4e-3}
    for _ in range(60):
        lease = rig.begin(rig.prompt(40))
        rig.now += 0.005 + pace[lease.worker] * 641
        lease.first_token(rig.now)
        lease.finish(ok(641, 0, itl_s=0.01), rig.now + 0.01)
        rig.now += 0.02
    learned = {item.id: item.prefill_s_per_token for item in rig.router.workers(rig.now)}
    assert learned["w1"] < learned["w2"]
    assert learned["w1"] == pytest.approx(1e-3, rel=0.35)
    route = rig.route(rig.prompt(40))
    assert isinstance(route, Route)
    assert route.worker == "w1"
    assert route.predicted_ttft_s == pytest.approx(0.005 + 641e-3, rel=0.35)


@pytest.mark.parametrize(
    ("matched", "share"),
    [
        ([800], 0.8),
        ([800, 0, 0], 0.8),
        ([800, 300, 500], 0.3),
        ([800, 800], 0.0),
        ([300, 800], 0.0),
        ([0, 800], 0.0),
    ],
)
def test_bound_is_what_only_the_chosen_worker_holds(matched: list[int], share: float) -> None:
    order = tuple(
        Scored(Candidate(view(f"w{at}"), tokens), 0.0, {}) for at, tokens in enumerate(matched)
    )
    route = Route(query(tokens=1000), "cost", order, Overlap(), 0.0, 0.0)
    assert _bound(route) == pytest.approx(share)
