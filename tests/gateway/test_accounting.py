"""Each loss planted with an exact number of tokens, through whole requests."""

from __future__ import annotations

from routerkit import Rig, failed, flow_of, ok

from gateway.lease import family_of
from gateway.records import Outcome
from shared.types import WorkerId


def test_a_cold_prompt() -> None:
    rig = Rig()
    assert flow_of(rig.serve(rig.prompt(10), 0)) == {"prompt": 161, "tail": 1, "cold": 160}


def test_a_clean_hit() -> None:
    rig = Rig()
    keys = rig.prompt(10)
    rig.warm("w1", keys)
    record = rig.serve(keys + rig.prompt(2), 160)
    assert flow_of(record) == {
        "prompt": 193,
        "tail": 1,
        "cold": 32,
        "available": 160,
        "captured": 160,
        "delivered": 160,
    }
    assert record.reported
    assert (record.worker, record.trust, record.policy) == ("w1", "exact", "cost")


def test_the_last_block_of_a_full_prompt_is_tail() -> None:
    rig = Rig(workers=1)
    keys = rig.prompt(4)
    rig.warm("w1", keys)
    decision = rig.router.decide(rig.query(keys, tokens=64), rig.now)
    record = rig.router.begin(decision, rig.now, attempt=1).finish(ok(64, 48), rig.now)
    assert flow_of(record) == {
        "prompt": 64,
        "tail": 16,
        "available": 48,
        "captured": 48,
        "delivered": 48,
    }


def test_evicted_is_what_was_served_before_and_nobody_holds() -> None:
    rig = Rig()
    keys = rig.prompt(10)
    rig.serve(keys, 0)
    rig.now += 60
    rig.serve(rig.prompt(1))
    record = rig.serve(keys + rig.prompt(3), 0)
    assert flow_of(record) == {"prompt": 209, "tail": 1, "cold": 48, "evicted": 160}


def test_a_dead_workers_contents_count_as_evicted() -> None:
    rig = Rig(workers=2)
    keys = rig.prompt(10)
    record = rig.serve(keys, 0)
    rig.warm(record.worker, keys)
    rig.router.leave(WorkerId(record.worker), rig.now, "killed")
    assert flow_of(rig.serve(keys, 0)) == {"prompt": 161, "tail": 1, "evicted": 160}


def test_draining() -> None:
    rig = Rig(workers=2)
    keys = rig.prompt(10)
    rig.warm("w1", keys)
    rig.warm("w2", keys[:4])
    rig.router.drain(WorkerId("w1"), rig.now)
    assert flow_of(rig.serve(keys, 64)) == {
        "prompt": 161,
        "tail": 1,
        "available": 160,
        "captured": 64,
        "draining": 96,
        "delivered": 64,
    }


def test_diverted_for_load_and_for_another_policy() -> None:
    for policy, reason in (("cost", "diverted_for_load"), ("least_loaded", "policy")):
        rig = Rig(workers=2)
        keys = rig.prompt(10)
        rig.warm("w1", keys)
        while True:
            lease = rig.begin(keys, policy=policy)
            if lease.worker == "w2":
                break
        record = lease.finish(ok(161, 0), rig.now)
        assert flow_of(record) == {
            "prompt": 161,
            "tail": 1,
            "available": 160,
            reason: 160,
        }


def test_a_retry_does_not_take_its_own_first_attempt_for_a_holder() -> None:
    rig = Rig(workers=2)
    keys = rig.prompt(10)
    query = rig.query(keys)
    first = rig.router.begin(rig.router.decide(query, rig.now), rig.now, attempt=1)
    second = rig.router.decide(query, rig.now, exclude={first.worker})
    assert flow_of(first.finish(failed(final=False), rig.now)) == {}
    record = rig.router.begin(second, rig.now, attempt=2).finish(ok(161, 0), rig.now)
    assert (record.attempt, record.final) == (2, True)
    assert flow_of(record) == {"prompt": 161, "tail": 1, "cold": 160}


def test_what_an_excluded_worker_held_is_diverted() -> None:
    rig = Rig(workers=2)
    keys = rig.prompt(10)
    rig.warm("w1", keys)
    lease = rig.begin(keys, exclude={WorkerId("w1")})
    flow = flow_of(lease.finish(ok(161, 0), rig.now))
    assert flow["diverted_for_load"] == 160


def test_stale_mismatch_unreported_and_gained() -> None:
    rig = Rig(workers=1)
    keys = rig.prompt(10)
    rig.warm("w1", keys)
    base = {"prompt": 161, "tail": 1, "available": 160, "captured": 160}
    stale = rig.begin(keys).finish(ok(161, 96), rig.now)
    assert flow_of(stale) == base | {"delivered": 96, "stale_index": 64}
    mismatch = rig.begin(keys).finish(ok(170, 0), rig.now)
    assert flow_of(mismatch) == base | {"token_mismatch": 160}
    left_out = rig.begin(keys).finish(ok(161, None), rig.now)
    assert flow_of(left_out) == base | {"stale_index": 160}, "absent is 0 once it has reported"
    assert left_out.reported
    aborted = rig.begin(keys).finish(failed(499, Outcome.CLIENT_GONE), rig.now)
    assert flow_of(aborted) == base | {"unreported": 160}
    other = rig.prompt(3)
    gained = rig.begin(other).finish(ok(49, 48), rig.now)
    assert flow_of(gained) == {"prompt": 49, "tail": 1, "cold": 48, "delivered": 48, "gained": 48}


def test_absent_is_not_zero_before_the_engine_has_reported_something() -> None:
    rig = Rig(workers=1)
    keys = rig.prompt(10)
    rig.warm("w1", keys)
    for usage in (None, 0, None):
        silent = rig.begin(keys).finish(ok(161, usage), rig.now)
        lost = "stale_index" if usage == 0 else "unreported"
        assert flow_of(silent) == {
            "prompt": 161,
            "tail": 1,
            "available": 160,
            "captured": 160,
            lost: 160,
        }
        assert silent.reported is (usage == 0)


def test_a_prompt_known_as_text_is_counted_in_the_engines_tokens() -> None:
    rig = Rig(workers=1, events=False)
    keys = rig.prompt(10)
    for cached in (0, 200):
        decision = rig.router.decide(rig.query(keys, tokens=0), rig.now)
        lease = rig.router.begin(decision, rig.now, attempt=1)
        record = lease.finish(ok(252, cached), rig.now)
    # 168 bytes' worth of four are 252 tokens here: 160 of them matched.
    assert record.flow.captured == 240
    assert record.flow.stale_index == 40


def test_without_a_tokenizer_the_engines_count_is_taken() -> None:
    rig = Rig(workers=1)
    decision = rig.router.decide(rig.query([], tokens=0), rig.now)
    record = rig.router.begin(decision, rig.now, attempt=1).finish(ok(100, 32), rig.now)
    assert flow_of(record) == {
        "prompt": 100,
        "tail": 4,
        "cold": 96,
        "delivered": 32,
        "gained": 32,
    }


def test_times_are_counted_from_the_arrival() -> None:
    rig = Rig(workers=1)
    query = rig.query(rig.prompt(5))
    decision = rig.router.decide(query, rig.now + 0.25)
    lease = rig.router.begin(decision, rig.now + 0.25, attempt=1)
    lease.first_token(rig.now + 1.0)
    record = lease.finish(ok(81, 0, itl_s=0.02, route="/v1/completions"), rig.now + 2.0)
    assert (record.decided_s, record.ttft_s, record.total_s) == (0.25, 1.0, 2.0)
    assert record.predicted_ttft_s is not None
    assert record.predicted_ttft_s > 0.25
    assert (record.route, record.output_tokens, record.at) == ("/v1/completions", 4, 1.0)


def test_families_share_a_beginning() -> None:
    rig = Rig()
    shared = rig.prompt(6)
    one, two = rig.query(shared + rig.prompt(3)), rig.query(shared + rig.prompt(9))
    assert family_of(one) == family_of(two)
    assert len(family_of(one)) == 8
    assert family_of(rig.query(rig.prompt(6))) != family_of(one)
    assert family_of(rig.query([])) == ""
