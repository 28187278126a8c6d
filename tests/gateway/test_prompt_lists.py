"""Lists of prompts: one request, whose prompts are looked up, promised and learned one by one."""

from __future__ import annotations

from routerkit import Rig, flow_of, ok

from gateway.decision import Route
from gateway.lease import Lease
from gateway.records import RequestRecord
from gateway.routing.base import Query, key_tokens
from shared.types import BlockKey, WorkerId

Keys = list[BlockKey]


def listed(rig: Rig, *prompts: Keys, text: bool = False) -> Query:
    """A list of prompts, each a token longer than its keys; ``text``: nobody has counted them."""
    each = tuple(rig.query(keys, **({"tokens": 0} if text else {})) for keys in prompts)
    tokens = sum(one.prompt_tokens for one in each)
    return rig.query(prompts[0], tokens=tokens, prompts=each)


def route(rig: Rig, query: Query, **options: object) -> Route:
    decision = rig.router.decide(query, rig.now, **options)  # type: ignore[arg-type]
    assert isinstance(decision, Route)
    return decision


def begin(rig: Rig, query: Query, **options: object) -> Lease:
    return rig.router.begin(route(rig, query, **options), rig.now, attempt=1)


def serve(rig: Rig, query: Query, cached: int | None, prompt: int = 0) -> RequestRecord:
    lease = begin(rig, query)
    lease.first_token(rig.now)
    return lease.finish(ok(prompt or query.prompt_tokens, cached), rig.now)


def test_all_prompts_are_predicted() -> None:
    rig = Rig()
    one, two = rig.prompt(10), rig.prompt(4)
    rig.warm("w2", one)
    rig.warm("w2", two)
    record = serve(rig, listed(rig, one, two + rig.prompt(3)), 224)
    assert (record.worker, record.matched_tokens) == ("w2", 224)
    assert flow_of(record) == {
        "prompt": 161 + 113,
        "tail": 2,
        "cold": 48,
        "available": 224,
        "captured": 224,
        "delivered": 224,
    }


def test_what_another_worker_holds_is_not_evicted() -> None:
    rig = Rig(workers=2)
    one, two = rig.prompt(10), rig.prompt(4)
    rig.warm("w1", one)
    rig.warm("w2", two)
    assert flow_of(serve(rig, listed(rig, one, two), 160)) == {
        "prompt": 161 + 65,
        "tail": 2,
        "available": 224,
        "captured": 160,
        "diverted_for_load": 64,
        "delivered": 160,
    }


def test_one_prompt_that_is_held_hides_no_other_that_is_evicted() -> None:
    rig = Rig(workers=1)
    one, two = rig.prompt(4), rig.prompt(10)
    serve(rig, listed(rig, two), 0)
    rig.now += 60
    rig.warm("w1", one)  # by another gateway's request
    assert flow_of(serve(rig, listed(rig, one, two), 64)) == {
        "prompt": 65 + 161,
        "tail": 2,
        "evicted": 160,
        "available": 64,
        "captured": 64,
        "delivered": 64,
    }


def test_a_prompt_without_a_full_block_is_tail() -> None:
    rig = Rig(workers=1)
    one = rig.prompt(4)
    rig.warm("w1", one)
    query = listed(rig, [], one)
    assert flow_of(serve(rig, query, 64))["tail"] == 1 + 1


def test_all_prompts_of_a_list_under_way_are_promised() -> None:
    rig = Rig(workers=1)
    one, two = rig.prompt(10), rig.prompt(4)
    lease = begin(rig, listed(rig, one, two))
    for keys in (one, two):
        assert rig.route(keys).matched_tokens == len(keys) * 16
    lease.finish(ok(226, 0), rig.now)
    rig.now += 2
    for keys in (one, two):
        assert rig.route(keys).matched_tokens == 0, "no event has confirmed it"


def test_all_prompts_of_a_list_are_learned() -> None:
    rig = Rig(events=False)
    one, two = rig.prompt(10), rig.prompt(4)
    holder = serve(rig, listed(rig, one, two), 0).worker
    rig.now += 60
    for keys in (one, two):
        assert (rig.route(keys).worker, rig.route(keys).matched_tokens) == (holder, len(keys) * 16)


def test_lists_known_as_text_are_counted_in_the_engines_tokens() -> None:
    rig = Rig(workers=1, events=False)
    one, two = rig.prompt(10), rig.prompt(4)
    query = listed(rig, one, two, text=True)
    assert key_tokens(query) == 224
    for cached in (0, 336):  # 224 and half a piece for each are 240, and 360 to the engine
        record = serve(rig, query, cached, prompt=360)
        record.flow.check()
    assert (record.flow.captured, record.flow.stale_index, record.flow.gained) == (336, 0, 0)


def test_an_engine_that_tells_of_one_prompt_only_is_believed_no_less() -> None:
    rig = Rig(workers=1)
    one, two = rig.prompt(10), rig.prompt(10)
    rig.warm("w1", one)
    rig.warm("w1", two)
    serve(rig, rig.query(one), 160)
    for _ in range(40):
        rig.now += 3
        record = serve(rig, listed(rig, one, two), 160)
    assert record.flow.stale_index == 160, "as it said itself"
    assert str(rig.router.workers(rig.now)[0].trust) == "exact"


def test_draining_holders_of_single_prompts_are_named() -> None:
    rig = Rig(workers=2)
    one, two = rig.prompt(10), rig.prompt(4)
    rig.warm("w1", one)
    rig.warm("w2", two)
    rig.router.drain(WorkerId("w1"), rig.now)
    flow = flow_of(serve(rig, listed(rig, one, two), 64))
    assert (flow["draining"], flow["captured"]) == (160, 64)
