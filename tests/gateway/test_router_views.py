"""What the router is told by others than workers, and what it answers besides decisions."""

from __future__ import annotations

import pytest
from routerkit import Rig

from gateway.decision import Booked
from gateway.learned import Fact
from gateway.parity import Parity, Verdict
from gateway.routing.base import Trust
from shared.blocks import pack_keys
from shared.load import WorkerLoad
from shared.types import WorkerId

W1 = WorkerId("w1")


def trust(rig: Rig, worker: str = "w1") -> tuple[Trust, str]:
    status = next(one for one in rig.router.workers(rig.now) if one.id == worker)
    return status.trust, status.trust_reason


def test_what_a_worker_holds_can_be_forgotten() -> None:
    rig = Rig(2)
    keys = rig.prompt(4)
    rig.warm("w1", keys)
    assert rig.route(keys).matched_tokens == 64
    assert rig.router.flush(W1, rig.now) == 4
    assert rig.route(keys).matched_tokens == 0
    assert rig.router.flush(WorkerId("nobody"), rig.now) is None


def test_a_worker_that_makes_other_tokens_is_not_believed_until_it_makes_the_same() -> None:
    rig = Rig(1)
    rig.router.note_parity(W1, Parity(Verdict.DIFFERENT, "another template"), rig.now)
    state, reason = trust(rig)
    assert state is Trust.LEARNED
    assert "another template" in reason
    rig.router.note_parity(W1, Parity(Verdict.EQUAL, ""), rig.now)
    assert trust(rig)[0] is Trust.EXACT


def test_each_cause_of_mistrust_is_lifted_for_itself() -> None:
    rig = Rig(1)
    for cause in ("one", "two"):
        rig.router.limit_trust(W1, cause, Trust.LEARNED, f"because of {cause}")
    rig.router.limit_trust(W1, "one", None, "")
    assert trust(rig) == (Trust.LEARNED, "because of two")
    rig.router.limit_trust(W1, "two", None, "")
    assert trust(rig)[0] is Trust.EXACT


def test_what_several_gateways_booked_adds_up() -> None:
    rig = Rig(2, policy="least_loaded")
    for gateway in ("a", "b"):
        rig.router.apply_peer_bookings(gateway, {W1: Booked(1.0, 10, 1)}, rig.now)
    rig.router.apply_peer_bookings("c", {WorkerId("w2"): Booked(1.5, 15, 1)}, rig.now)
    assert {rig.route(rig.prompt(2)).worker for _ in range(8)} == {"w2"}
    rig.router.apply_peer_bookings("b", {}, rig.now)
    rig.router.apply_peer_bookings("d", {WorkerId("w2"): Booked(1.5, 15, 1)}, rig.now)
    rig.router.apply_peer_bookings("e", {}, rig.now)
    assert {rig.route(rig.prompt(2)).worker for _ in range(8)} == {"w1"}


@pytest.mark.parametrize("first", ["report", "peer"])
@pytest.mark.parametrize(("tokens", "left_s"), [(3_000, 1.0), (20_000, 1.7)])
def test_work_that_worker_and_peer_both_tell_of_counts_once(first, tokens, left_s) -> None:
    rig = Rig(1)

    def report() -> None:
        load = WorkerLoad(running=1, queued_prefill_tokens=tokens, prefill_tokens_per_s=1e4)
        rig.router.apply_load(W1, load, rig.now)

    def peer() -> None:
        rig.router.apply_peer_bookings("b", {W1: Booked(1.3, 0, 1)}, rig.now)

    for tell in [report, peer] if first == "report" else [peer, report]:
        tell()
    rig.now += 0.3
    wait_s = rig.route(rig.prompt(1)).chosen.candidate.worker.booked_prefill_s
    assert wait_s == pytest.approx(left_s)


def test_what_another_gateway_saw_served_is_known() -> None:
    rig = Rig(2, events=False)
    keys = rig.prompt(4)
    rig.router.apply_learned(Fact("w2", pack_keys(keys), prompt_tokens=65, output_tokens=4))
    route = rig.route(keys)
    assert (route.worker, route.matched_tokens) == ("w2", 64)
    assert [one.candidate.host_tokens for one in route.order] == [0, 0]
    rig.router.apply_learned(Fact("w2", b""))
    assert rig.route(keys).matched_tokens == 0
    rig.router.apply_learned(Fact("nobody", pack_keys(keys)))


def test_the_index_is_told_worker_by_worker_in_the_order_of_their_names() -> None:
    rig = Rig(0)
    for name in ("w3", "w1", "w2"):
        rig.join(name)
    assert [one.id for one in rig.router.index_stats(rig.now).workers] == ["w1", "w2", "w3"]


def test_who_holds_a_prompt() -> None:
    rig = Rig(2)
    keys = rig.prompt(4)
    rig.warm("w2", keys[:2])
    found = rig.router.who(rig.query(keys), rig.now)
    assert found is not None
    assert found.prompt_tokens == 65
    assert found.matchable_tokens == 64
    assert found.holders[0].id == "w2"
    assert rig.router.who(rig.query(keys, model="other"), rig.now) is None


def test_a_request_that_was_tried_everywhere_is_told_so() -> None:
    rig = Rig(2)
    exclude = {WorkerId(name) for name in rig.names}
    refused = rig.reject(rig.query(rig.prompt(1)), exclude=exclude)
    assert refused.reason == "all_tried"
    assert str(refused.error) == "All workers were tried."
