"""Silence of a worker that is busy with others' answers: an unstreamed one says nothing until it
is whole. Taken for failures, it made busy workers rest in turn, each at the cost of the other."""

from __future__ import annotations

import pytest
from routerkit import Rig, failed, ok

from gateway.decision import Route
from gateway.lease import Lease
from gateway.records import Outcome
from gateway.routing.base import WorkerState
from shared.types import WorkerId

SILENT = failed(504, silent=True)
TOKEN_S, TOKENS = 0.05, 600
IDLE_LIMIT_S = 10.0


def on_w1(rig: Rig, tokens: int = TOKENS) -> Lease:
    query = rig.query(rig.prompt(1), max_tokens=tokens)
    route = rig.router.decide(query, rig.now, exclude=[WorkerId("w2")])
    assert isinstance(route, Route)
    return rig.router.begin(route, rig.now, attempt=1)


def state(rig: Rig) -> WorkerState:
    return next(one.state for one in rig.router.workers(rig.now) if one.id == "w1")


@pytest.fixture
def rig() -> Rig:
    """Two workers; the first is known to take its time for each token."""
    made = Rig(workers=2)
    lease = on_w1(made)
    lease.first_token(made.now)
    lease.finish(ok(itl_s=TOKEN_S), made.now)
    return made


def silent_attempts(rig: Rig, *, answers: bool, after_s: float = IDLE_LIMIT_S) -> None:
    """Four that nothing came of; whether another one on the same worker was answered meanwhile."""
    silent = [on_w1(rig) for _ in range(4)]
    other = on_w1(rig, tokens=2)
    rig.now += after_s
    if answers:
        other.finish(ok(), rig.now)
    for lease in silent:
        assert lease.finish(SILENT, rig.now).outcome is Outcome.UPSTREAM_ERROR


def test_who_answers_others_and_may_take_so_long_has_not_failed(rig: Rig) -> None:
    silent_attempts(rig, answers=True)
    assert state(rig) is WorkerState.READY
    assert {one.failure_rate for one in rig.router.workers(rig.now)} == {0.0}
    assert rig.inflight() == {"w1": 0, "w2": 0}


def test_first_tokens_show_life_as_whole_answers_do(rig: Rig) -> None:
    silent, stream = [on_w1(rig) for _ in range(4)], on_w1(rig)
    rig.now += IDLE_LIMIT_S
    stream.first_token(rig.now)
    for lease in silent:
        lease.finish(SILENT, rig.now)
    assert state(rig) is WorkerState.READY


def test_who_answers_nobody_has_failed(rig: Rig) -> None:
    silent_attempts(rig, answers=False)
    assert state(rig) is WorkerState.EJECTED


def test_who_takes_longer_than_the_whole_answer_may_take_has_failed(rig: Rig) -> None:
    """Half of what it gets may go to a part of it that hangs."""
    silent_attempts(rig, answers=True, after_s=TOKENS * TOKEN_S + 1)
    assert state(rig) is WorkerState.EJECTED


def test_an_error_that_the_worker_sends_is_no_silence(rig: Rig) -> None:
    leases, other = [on_w1(rig) for _ in range(4)], on_w1(rig)
    rig.now += 1.0
    other.finish(ok(), rig.now)
    for lease in leases:
        lease.finish(failed(504), rig.now)
    assert state(rig) is WorkerState.EJECTED
