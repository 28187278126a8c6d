"""Why a worker was chosen: each code where it belongs, and a sentence that says it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from routerkit import Rig, ok

from gateway.reasons import CODES, TERMS, in_words, why, words_of
from gateway.records import RequestRecord, Why
from gateway.routing import cost
from gateway.routing.base import Scored


def finished(rig: Rig, keys: list[int], **options: object) -> RequestRecord:
    lease = rig.begin(keys, **options)  # type: ignore[arg-type]
    return lease.finish(ok(len(keys) * 16 + 1, lease.route.matched_tokens), rig.now)


def test_the_only_worker() -> None:
    record = finished(Rig(1), Rig(1).prompt(4))
    assert record.why == Why(code="only")
    assert words_of(record) == "w1 was the only worker that could take it"


def test_nobody_holds_any_of_it() -> None:
    rig = Rig(2)
    record = finished(rig, rig.prompt(4))
    assert record.why is not None
    assert (record.why.code, record.why.other_matched) == ("no_overlap", 0)
    assert words_of(record).startswith("no worker held any of it; w")


def test_the_holder_wins() -> None:
    rig = Rig(3)
    keys = rig.prompt(8)
    rig.warm("w2", keys)
    record = finished(rig, keys)
    assert record.why is not None
    assert (record.why.code, record.why.term) == ("holder", "own")
    assert record.why.gap > 0
    text = words_of(record)
    assert text.startswith("w2 held 128 of 129 tokens, more than any other; w")
    assert text.endswith("dearer, most of it what it would have had to compute")


def test_several_hold_it() -> None:
    rig = Rig(2)
    keys = rig.prompt(8)
    rig.warm("w1", keys)
    rig.warm("w2", keys)
    record = finished(rig, keys)
    assert record.why is not None
    assert record.why.code == "equal"
    assert "as others did" in words_of(record)


def test_the_holder_is_too_busy() -> None:
    rig = Rig(2)
    keys = rig.prompt(8)
    rig.warm("w1", keys)
    rig.now += 1
    busy = rig.prompt(4000)
    rig.warm("w1", busy[:2])
    route = rig.router.decide(rig.query(busy), rig.now)
    while route.worker != "w1":  # type: ignore[union-attr]
        rig.router.begin(route, rig.now, attempt=1)  # type: ignore[arg-type]
        route = rig.router.decide(rig.query(rig.prompt(4000)), rig.now)
    rig.router.begin(route, rig.now, attempt=1)  # type: ignore[arg-type]
    chosen = rig.route(keys)
    if chosen.worker == "w1":
        pytest.fail("w1 has seconds of work before it")
    reason = why(chosen)
    assert (reason.code, reason.other, reason.other_matched) == ("cheaper", "w1", 128)
    assert reason.term == "wait"
    text = in_words(reason, worker="w2", policy="cost", matched=0, prompt=129)
    assert text.startswith("w2 held 0 of 129 tokens: another held more, but was not worth it; w1 (")
    assert text.endswith("most of it work waiting there")


def test_a_popular_beginning_is_copied() -> None:
    """What the chosen worker would have cost without the discount decides."""
    rig = Rig(2)
    keys = rig.prompt(8)
    rig.warm("w1", keys)
    route = rig.route(keys)
    holder, other = route.order
    from msgspec.structs import replace

    copying = replace(other.candidate, shared_tokens=100.0)
    order = (Scored(copying, 0.5, {"own": 0.5}), Scored(holder.candidate, 0.505, {"own": 0.505}))
    reason = why(replace(route, order=order))
    assert reason.code == "copy"
    text = in_words(reason, worker="w2", policy="cost", matched=0, prompt=129)
    assert text.endswith("w1 held 128, but that beginning is popular: one more copy pays off")
    dear = (order[0], Scored(holder.candidate, 0.9, {"own": 0.9}))
    assert why(replace(route, order=dear)).code == "cheaper"


def test_a_policy_without_costs() -> None:
    rig = Rig(2)
    keys = rig.prompt(8)
    rig.warm("w2", keys)
    record = finished(rig, keys, policy="round_robin")
    assert record.why is not None
    assert (record.why.code, record.why.term) == ("policy", "")
    assert "policy round_robin chose it" in words_of(record)


def test_every_code_has_words() -> None:
    for code in CODES:
        reason = Why(code=code, term="wait", other="w2", other_matched=5, gap=0.25)
        text = in_words(reason, worker="w1", policy="p", matched=3, prompt=9)
        assert len(text) > 20
        assert "\n" not in text
    assert in_words(None, worker="w1", policy="p", matched=0, prompt=0) == ""


def test_every_term_of_the_cost_has_words() -> None:
    source = Path(cost.__file__).read_text()
    named = set(re.findall(r'terms\[\w+\]\["(\w+)"\]', source))
    named |= set(Rig(2).route(Rig(2).prompt(2)).chosen.parts)
    assert {"wait", "own", "failure"} <= named <= TERMS.keys()


def test_taking_turns_is_recorded_beside_every_decision() -> None:
    """Over many requests the worker whose turn it is holds what workers hold on average."""
    rig = Rig(4)
    keys = rig.prompt(8)
    rig.warm("w3", keys)
    shadows = [finished(rig, keys).round_robin for _ in range(40)]
    # the prompt is promised to whoever is computing it, so w3 alone holds it throughout
    assert [s.matched_tokens for s in shadows if s].count(128) == 10
    assert all(shadow is not None and shadow.ttft_s > 0 for shadow in shadows)
    held = []
    for _ in range(8):
        rig.router.explain(rig.query(keys), rig.now)  # takes no turn
        shadow = rig.route(keys).round_robin
        assert shadow is not None
        held.append(shadow.matched_tokens)
    assert held.count(128) == 2
