"""What the router is told of its members, and what it says of them."""

from __future__ import annotations

import pytest
from routerkit import Rig, failed

from gateway.config import RoutingConfig
from gateway.decision import Route, WorkerStatus
from gateway.learned import Fact
from gateway.parity import Parity, Verdict
from gateway.routing.base import Trust, WorkerState
from gateway.routing.catalogue import make_policies
from shared.blocks import pack_keys
from shared.errors import NoCapacity
from shared.events import BlocksStored, stored
from shared.load import AdapterInfo, WorkerLoad
from shared.types import Tier, WorkerId

W1, W2, NOBODY = WorkerId("w1"), WorkerId("w2"), WorkerId("nobody")


def status(rig: Rig, worker: str = "w1") -> WorkerStatus:
    [found] = [one for one in rig.router.workers(rig.now) if one.id == worker]
    return found


def test_a_rule_holds_for_those_who_are_there_and_those_who_join() -> None:
    rig = Rig(2)
    rig.router.accept(lambda info: "an old engine" if info.id in ("w2", "w3") else "")
    rig.join("w3")
    assert status(rig).state is WorkerState.READY
    for name in ("w2", "w3"):
        assert status(rig, name).state is WorkerState.DRAINING
        assert "an old engine" in status(rig, name).reason
    rig.router.undrain(W2, rig.now)
    assert status(rig, "w2").state is WorkerState.DRAINING, "the rule is not the operator's"
    rig.router.accept(lambda info: "")
    assert {one.state for one in rig.router.workers(rig.now)} == {WorkerState.READY}


def test_each_who_drains_a_worker_gives_a_reason_and_lifts_it_alone() -> None:
    rig = Rig(1)
    assert rig.router.drain(W1, rig.now, by="list", why="it left the list")
    assert rig.router.drain(W1, rig.now, why="maintenance")
    assert "it left the list" in status(rig).reason
    assert rig.router.undrain(W1, rig.now, by="list")
    assert "maintenance" in status(rig).reason
    assert rig.router.undrain(W1, rig.now, by="list"), "once more changes nothing"
    assert status(rig).state is WorkerState.DRAINING
    assert rig.router.undrain(W1, rig.now)
    assert (status(rig).state, status(rig).reason) == (WorkerState.READY, "")
    assert not rig.router.drain(NOBODY, rig.now)
    assert not rig.router.undrain(NOBODY, rig.now)


def test_health_is_as_the_last_probe_said() -> None:
    rig = Rig(1)
    rig.router.set_health(W1, False, rig.now, "no answer")
    assert status(rig).state is WorkerState.DOWN
    assert "no answer" in status(rig).reason
    rig.router.set_health(W1, True, rig.now, "fine")
    assert (status(rig).state, status(rig).reason) == (WorkerState.READY, "")
    rig.router.set_health(NOBODY, False, rig.now, "no answer")


@pytest.mark.parametrize("down", [True, False])
def test_only_who_was_down_and_is_back_begins_anew(down: bool) -> None:
    rig = Rig(1)
    for _ in range(5):
        rig.begin(rig.prompt(2)).finish(failed(), rig.now)
    failing = status(rig).failure_rate
    assert failing >= 0.5
    if down:
        rig.router.set_health(W1, False, rig.now, "no answer")
        assert status(rig).failure_rate == failing
    rig.router.set_health(W1, True, rig.now, "fine")
    assert status(rig).failure_rate == (0.0 if down else failing)


def test_one_that_leaves_takes_what_was_learned_of_it_along() -> None:
    rig = Rig(2)
    rig.router.apply_load(W1, WorkerLoad(prefill_tokens_per_s=1000.0), rig.now)
    rig.router.apply_load(W2, WorkerLoad(prefill_tokens_per_s=250.0), rig.now)
    keys = rig.prompt(4)
    rig.warm("w1", keys)
    lease = rig.begin(keys)
    rig.router.leave(W1, rig.now, "its registration expired")
    assert rig.router.has("w1"), "it still answers"
    lease.finish(failed(), rig.now)
    assert not rig.router.has("w1")
    assert rig.router.has("w2")
    assert rig.router.pool(W1) is None
    rig.join("w1", epoch=2)
    assert status(rig).prefill_s_per_token == pytest.approx(1 / 250, rel=0.15), "as its pool"
    assert status(rig).index_blocks == 0
    rig.router.leave(NOBODY, rig.now, "never seen")


def test_speed_is_learned_for_each_worker_of_each_pool() -> None:
    rig = Rig(2)
    rig.join("x", models=("other",))
    for worker, speed in ((W1, 1000.0), (W2, 250.0), (WorkerId("x"), 40.0)):
        rig.router.apply_load(worker, WorkerLoad(prefill_tokens_per_s=speed), rig.now)
    speeds = [status(rig, name).prefill_s_per_token for name in ("w1", "w2", "x")]
    assert speeds == pytest.approx([1 / 1000, 1 / 250, 1 / 40], rel=0.15)
    queued = WorkerLoad(prefill_tokens_per_s=250.0, queued_prefill_tokens=500)
    rig.now += 1.0
    rig.router.apply_load(W2, queued, rig.now)
    to_w2 = rig.route(rig.prompt(2), exclude=[W1]).chosen.parts["wait"]
    assert to_w2 == pytest.approx(500 * speeds[1]), "at its own speed"


def test_names_of_models_pools_and_neighbours() -> None:
    rig = Rig(2)
    rig.join("x", models=("other",), adapters=(AdapterInfo("tuned", "other"),))
    assert set(rig.router.models()) == {"m", "alias", "other", "tuned"}
    assert rig.router.base_models() == ["alias", "m", "other"]
    assert [rig.router.pool(WorkerId(name)) for name in ("w1", "x")] == ["m", "other"]
    assert rig.router.pool(NOBODY) is None
    assert rig.router.others("m", W1) == (W2,)
    assert rig.router.others("alias", W2) == (W1,)
    assert rig.router.others("other", WorkerId("x")) == ()
    assert rig.router.others("other", W1) == (), "it does not serve that itself"


def test_a_status_says_what_is_known() -> None:
    rig = Rig(1)
    keys = rig.prompt(6)
    rig.warm("w1", keys)
    seen = status(rig)
    assert (seen.index_blocks, seen.index_host_blocks, seen.learned_tokens) == (6, 0, 0)
    assert seen.prediction_error is None
    for _ in range(40):
        rig.serve(keys, cached=96)
    assert status(rig).prediction_error == pytest.approx(0.0, abs=0.01)
    learned = Rig(1, events=False)
    learned.serve(keys, cached=0)
    learned.serve(keys, cached=96)
    assert status(learned).learned_tokens > 0


def test_a_gap_in_its_events_lowers_trust_and_only_its_feed_raises_it() -> None:
    rig = Rig(2)
    assert (status(rig).trust, status(rig).trust_reason) == (Trust.EXACT, "events flow")
    rig.seqs["w1"] += 1
    assert rig.feed("w1", stored([1, 2], None)) != "applied"
    assert (status(rig).trust, status(rig, "w2").trust) == (Trust.LEARNED, Trust.EXACT)
    assert "gap" in status(rig).trust_reason
    rig.router.set_trust(W1, Trust.EXACT, "caught up", rig.now)
    assert (status(rig).trust, status(rig).trust_reason) == (Trust.EXACT, "caught up")


def test_one_that_leaves_and_comes_back_as_it_was_is_looked_at_anew() -> None:
    rig = Rig(2)
    rig.warm("w1", rig.prompt(4))
    rig.router.leave(W1, rig.now, "its registration expired")
    rig.join("w1")
    assert (status(rig).index_blocks, status(rig, "w2").index_blocks) == (0, 0)


def test_each_tier_of_a_worker_is_counted() -> None:
    rig = Rig(2)
    rig.warm("w1", rig.prompt(3))
    rig.feed("w1", BlocksStored(pack_keys(rig.prompt(2)), None, Tier.HOST))
    rig.feed("w2", BlocksStored(pack_keys(rig.prompt(5)), None, Tier.HOST))
    counts = [(one.index_blocks, one.index_host_blocks) for one in rig.router.workers(rig.now)]
    assert counts == [(3, 2), (0, 5)]


def test_what_taking_turns_would_have_chosen_goes_round() -> None:
    rig = Rig(3)
    keys = rig.prompt(4)
    rig.warm("w2", keys)
    shadows = [rig.route(keys).round_robin for _ in range(6)]
    matched = [shadow.matched_tokens for shadow in shadows if shadow is not None]
    assert sorted(matched[:3]) == [0, 0, 64]
    assert matched[3:] == matched[:3]


def test_nobody_begins_on_one_that_has_left() -> None:
    rig = Rig(1)
    route = rig.route(rig.prompt(2))
    rig.router.leave(W1, rig.now, "gone")
    with pytest.raises(LookupError, match="worker w1 has left"):
        rig.router.begin(route, rig.now, attempt=1)


def test_who_holds_a_prompt_and_may_it_be_asked() -> None:
    rig = Rig(2)
    keys = rig.prompt(4)
    rig.warm("w1", keys)
    for _ in range(5):
        rig.begin(keys, exclude=[W2]).finish(failed(), rig.now)
    found = rig.router.who(rig.query(keys), rig.now)
    assert found is not None
    held = {holder.id: (holder.tokens, holder.state) for holder in found.holders}
    assert held["w1"] == (64, WorkerState.EJECTED)
    assert rig.router.who(rig.query(keys, model="another"), rig.now) is None


def test_the_index_says_how_much_it_may_hold_and_is_cleaned_as_loads_come() -> None:
    rig = Rig(1, index_max_blocks=5000)
    assert rig.router.index_stats(rig.now).max_entries == 5000
    asked: list[int] = []
    tidy = rig.index.tidy
    rig.index.tidy = lambda budget: asked.append(budget) or tidy(budget)  # type: ignore[func-returns-value, method-assign]
    rig.router.apply_load(W1, WorkerLoad(), rig.now)
    assert len(asked) == 1
    assert 0 < asked[0] < 100_000, "a little at a time"


def test_a_drain_without_a_reason_is_just_that() -> None:
    rig = Rig(1)
    rig.router.drain(W1, rig.now)
    assert status(rig).reason == "draining"


def test_mistrust_for_other_tokens_is_a_cause_of_its_own() -> None:
    rig = Rig(1)
    rig.router.note_parity(W1, Parity(Verdict.DIFFERENT, "another template"), rig.now)
    rig.router.limit_trust(W1, "tokens", None, "")
    assert status(rig).trust is Trust.EXACT
    rig.router.note_parity(NOBODY, Parity(Verdict.DIFFERENT, "another template"), rig.now)


def test_other_settings_count_from_the_next_decision_on() -> None:
    rig = Rig(2, policy="round_robin")
    assert rig.route(rig.prompt(2)).policy == "round_robin"
    other = RoutingConfig(policy="least_loaded")
    rig.router.reconfigure(make_policies(other), other)
    assert rig.route(rig.prompt(2)).policy == "least_loaded"


def test_an_explanation_leaves_out_who_was_tried() -> None:
    rig = Rig(2)
    said = rig.router.explain(rig.query(rig.prompt(2)), rig.now, exclude=[W1])
    assert isinstance(said, Route)
    assert [scored.candidate.worker.id for scored in said.order] == [W2]


def test_gateways_hear_where_the_others_send_prefill() -> None:
    here, there = Rig(1), Rig(1)
    for _ in range(20):
        here.begin(here.prompt(50))
        here.now += 0.1
    flows = here.router.flows(here.now)
    assert flows.workers["w1"].work_s > 0.0
    assert here.router.flows(here.now + 1000.0).pools.get("m", 0.0) < flows.pools["m"] / 10

    def busy() -> float:
        there.now += 1.0
        return there.route(there.prompt(2)).chosen.parts["home"]

    there.router.apply_peer_flows("a", flows)
    alone = busy()
    assert alone > 0.0
    there.router.apply_peer_flows("b", flows)
    assert busy() > alone
    there.router.apply_peer_flows("a", None)
    assert busy() == pytest.approx(alone)


def test_what_others_do_not_know_is_handed_out_in_parts() -> None:
    rig = Rig(1, events=False)
    assert not list(rig.router.learned(2)), "from now on somebody asks"
    for _ in range(5):
        rig.serve(rig.prompt(3))
    first = list(rig.router.learned(2))
    assert len(first) == 2
    rest = list(rig.router.learned(100))
    assert rest
    assert all(isinstance(fact, Fact) for fact in first + rest)
    assert not list(rig.router.learned(100))


def test_the_record_of_a_request_that_reached_nobody() -> None:
    rig = Rig(1)
    asked = rig.query(rig.prompt(2))
    record = rig.router.reject_record(asked, "/v1/x", NoCapacity("full"), asked.arrived + 2, 77.0)
    assert (record.request_id, record.route, record.at) == (asked.request_id, "/v1/x", 77.0)
    assert (record.status, record.total_s) == (503, pytest.approx(2.0))
    unread = rig.router.reject_record(None, "/v1/x", NoCapacity("full"), 5.0, 78.0)
    assert (unread.request_id, unread.total_s, unread.at) == ("", 0.0, 78.0)
