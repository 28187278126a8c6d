"""What holds for every policy and any fleet."""

from __future__ import annotations

from copy import deepcopy
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.config import RoutingConfig
from gateway.routing.base import Candidate, Query, Trust, WorkerState, WorkerView
from gateway.routing.catalogue import FACTORIES, make_policies
from gateway.routing.contract import check_policy
from shared.types import BlockKey, RequestId, WorkerId

views = st.builds(
    WorkerView,
    id=st.integers(0, 999).map(lambda n: WorkerId(f"w{n}")),
    state=st.just(WorkerState.READY),
    trust=st.sampled_from(Trust),
    block_size=st.just(16),
    inflight=st.integers(0, 50),
    booked_prefill_s=st.floats(0, 100),
    booked_decode_tokens=st.integers(0, 100_000),
    prefill_s_per_token=st.floats(1e-6, 0.1),
    overhead_s=st.floats(0, 1),
    failure_rate=st.floats(0, 1),
    kv_tokens_total=st.integers(0, 100_000),
    foreign=st.integers(0, 200),
    tpot_s=st.floats(0, 0.2),
    release_tokens_per_s=st.floats(0, 1e5),
)
candidates = st.lists(
    st.builds(
        Candidate,
        worker=views,
        matched_tokens=st.integers(0, 20).map(lambda n: n * 16),
        new_kv_tokens=st.integers(0, 5000),
    ),
    max_size=8,
    unique_by=lambda candidate: candidate.worker.id,
)
queries = st.builds(
    Query,
    request_id=st.text("abcdef0123456789", min_size=4, max_size=8).map(RequestId),
    model=st.just("m"),
    prompt_tokens=st.integers(0, 400),
    max_tokens=st.integers(0, 100),
    arrived=st.just(0.0),
    keys=st.lists(st.integers(0, 2**64 - 1).map(BlockKey), max_size=25),
    tenant=st.sampled_from(["", "t"]),
    session=st.sampled_from(["", "s", "\ud800"]),
)
CONFIG = RoutingConfig(options={"dynamo_linear": {"temperature": 0.5}})
"""So that its draws are tried too."""


@given(query=queries, pool=candidates, name=st.sampled_from(sorted(FACTORIES)))
def test_every_policy_ranks_all_candidates_reproducibly(
    query: Query, pool: list[Candidate], name: str
) -> None:
    policy = make_policies(CONFIG)[name]
    assert policy.name == name
    twin = deepcopy(policy)
    before = deepcopy((query, pool))
    ranked = policy.rank(query, pool, Random(7))
    assert (query, pool) == before, "it changes what it is given"
    assert sorted(item.candidate.worker.id for item in ranked) == sorted(
        candidate.worker.id for candidate in pool
    )
    again = twin.rank(query, pool, Random(7))
    assert [item.candidate.worker.id for item in again] == [
        item.candidate.worker.id for item in ranked
    ]


@given(name=st.sampled_from(sorted(FACTORIES)), seed=st.integers(0, 2**32))
def test_every_policy_passes_the_check_of_plug_ins(name: str, seed: int) -> None:
    check_policy(lambda: make_policies(CONFIG)[name], seed, rounds=3)


@given(query=queries, pool=candidates, seed=st.integers())
def test_the_order_of_the_fleet_does_not_matter(
    query: Query, pool: list[Candidate], seed: int
) -> None:
    shuffled = list(pool)
    Random(seed).shuffle(shuffled)
    for name in FACTORIES:
        orders = [
            [
                item.candidate.worker.id
                for item in make_policies(CONFIG)[name].rank(query, some, Random(0))
            ]
            for some in (pool, shuffled)
        ]
        assert orders[0] == orders[1], name


@given(query=queries, pool=candidates)
def test_cost_is_the_sum_of_its_named_terms_and_rises(query: Query, pool: list[Candidate]) -> None:
    ranked = make_policies(RoutingConfig())["cost"].rank(query, pool, Random(0))
    for item in ranked:
        assert abs(sum(item.parts.values()) - item.cost) < 1e-6 * (1 + item.cost)
        assert min(item.parts.values()) >= 0
    costs = [round(item.cost, 4) for item in ranked]
    assert costs == sorted(costs)
