"""The cost of a candidate is the formula in the module's text, written down once more."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policykit import query, view

from gateway.routing.base import Candidate, Query
from gateway.routing.cost import CostModel, CostPolicy
from gateway.routing.guards import held_back
from gateway.routing.places import place_waits
from gateway.routing.pressure import Offered

MODEL = CostModel(
    quadratic=3e-5, least=0.2, kappa=2.5, most=11.0, knee=50.0, unknown_tpot_s=0.02, later=0.4
)
"""Its own constants, so that one that is written into the code is noticed."""


@dataclass(frozen=True)
class Expected:
    """What the text says of one candidate."""

    compute_s: float
    promised_s: float
    lost_s: float
    terms: dict[str, float]

    @staticmethod
    def of(asked: Query, candidate: Candidate) -> Expected:
        worker, offered = candidate.worker, candidate.worker.offered
        length = asked.prompt_tokens or 16 * len(asked.keys)

        def computing(uncached: float) -> float:
            attended = uncached * (length - uncached / 2)
            return worker.prefill_s_per_token * (uncached + MODEL.quadratic * attended)

        uncached = max(0, length - candidate.matched_tokens)
        a_load = min(worker.host_s_per_token, worker.prefill_s_per_token)
        load, prefill = candidate.host_tokens * a_load, computing(uncached)
        unpaid = max(0.0, 1 - candidate.shared_tokens / uncached) if uncached else 1.0
        seconds, lost = load + prefill, load + prefill * unpaid
        busy = worker.pool_busy
        grown = MODEL.least + MODEL.kappa * busy / (1 - busy) if busy < 1 else MODEL.most
        waited = worker.booked_prefill_s
        per_s, unfinished = offered.bound_per_s, 1 - offered.bound_busy
        memory, held = 0.0, worker.kv_tokens_total
        if held:
            short = candidate.new_kv_tokens - (held - worker.booked_decode_tokens)
            freed_per_s = max(worker.release_tokens_per_s or held / 60, held / 600)
            memory = max(0.0, short / freed_per_s)
        return Expected(
            compute_s=seconds,
            promised_s=computing(candidate.promised_tokens),
            lost_s=lost,
            terms={
                "wait": waited,
                "own": worker.overhead_s + lost,
                "others": min(MODEL.most, grown) * lost,
                "behind": per_s * seconds * (waited + seconds / 2) / unfinished,
                "home": MODEL.later * offered.mean_wait_s,
                "memory": memory,
                "decode": (worker.tpot_s or MODEL.unknown_tpot_s) * worker.requests / MODEL.knee,
            },
        )


seconds = st.sampled_from((0.0, 0.004, 0.3, 7.0))
tokens = st.integers(0, 3000)
counts = st.sampled_from((0, 1, 2, 3, 4, 5, 9, 30))


@st.composite
def candidates(draw: st.DrawFn, name: str = "w", popular: bool = True) -> Candidate:
    inflight, booked = draw(counts), draw(tokens)
    total = draw(st.sampled_from((0, 1, 2000)))
    worker = view(
        name,
        inflight=inflight,
        foreign=draw(counts),
        decoding=draw(st.integers(0, inflight)),
        booked_prefill_s=draw(seconds),
        booked_decode_tokens=booked,
        prefill_s_per_token=draw(st.sampled_from((2e-5, 1e-3))),
        overhead_s=draw(seconds),
        failure_rate=draw(st.sampled_from((0.0, 0.0, 0.3, 0.97))),
        failure_s=draw(seconds),
        host_s_per_token=draw(st.sampled_from((0.0, 1e-5, 1.0))),
        kv_tokens_total=total,
        tpot_s=draw(seconds),
        release_tokens_per_s=draw(st.sampled_from((0.0, 0.5, 90.0))),
        pool_busy=draw(st.sampled_from((0.0, 0.4, 0.79, 0.813, 0.83, 1.0, 1.6))),
        fresh=draw(st.booleans()),
        at_once=draw(st.sampled_from((4, 6))),
        service_s=draw(seconds),
        offered=Offered(draw(seconds), draw(st.sampled_from((0.0, 0.5, 0.9))), draw(seconds)),
    )
    matched = draw(tokens)
    return Candidate(
        worker,
        matched,
        promised_tokens=draw(st.integers(0, matched)),
        shared_tokens=draw(st.sampled_from((0.0, 40.5, 5000.0))) if popular else 0.0,
        new_kv_tokens=draw(st.one_of(tokens, st.just(max(0, total - booked + 1)))),
        host_tokens=draw(st.sampled_from((0, matched // 2))),
    )


queries = st.one_of(
    st.builds(query, st.integers(0, 99), tokens=st.integers(1, 3000)),
    st.builds(
        query, st.integers(0, 99), st.lists(st.just(7), max_size=90).map(tuple), st.just(0)
    ),
)  # fmt: skip


@given(queries, candidates())
def test_the_terms_of_one_candidate(asked: Query, candidate: Candidate) -> None:
    expected = Expected.of(asked, candidate)
    cost, terms = MODEL.price(asked, candidate)
    assert terms == pytest.approx(expected.terms)
    assert cost == pytest.approx(sum(expected.terms.values()))
    assert MODEL.compute_s(asked, candidate) == pytest.approx(expected.compute_s)
    assert MODEL.promised_s(asked, candidate) == pytest.approx(expected.promised_s)
    assert MODEL.lost_s(asked, candidate) == pytest.approx(expected.lost_s)
    assert MODEL.memory_s(candidate) == pytest.approx(expected.terms["memory"])
    own = candidate.worker.overhead_s + expected.compute_s
    assert MODEL.own_s(asked, candidate) == pytest.approx(own)
    first_token = expected.terms["wait"] + own + expected.terms["memory"]
    assert MODEL.expected_ttft_s(asked, candidate) == pytest.approx(first_token)


@given(queries, st.integers(1, 4).flatmap(lambda n: st.tuples(*[
    candidates(f"w{at}", popular=False) for at in range(n)
])))  # fmt: skip
def test_the_terms_of_several_and_their_order(asked: Query, pool: tuple[Candidate, ...]) -> None:
    workers = [candidate.worker for candidate in pool]
    terms = [Expected.of(asked, candidate).terms for candidate in pool]
    alone = [sum(parts.values()) for parts in terms]
    for at, worker in enumerate(workers):
        chance = min(worker.failure_rate, 0.9)
        again = worker.failure_s + min([*alone[:at], *alone[at + 1 :]], default=alone[at])
        terms[at]["failure"] = chance / (1 - chance) * again
    for parts, wait, worker in zip(terms, place_waits(workers), workers, strict=True):
        parts["place"] = max(0.0, wait - worker.booked_prefill_s)
    dearest = max(sum(parts.values()) for parts in terms)
    for at, parts in enumerate(terms):
        parts["fresh"] = dearest if at in held_back(pool) else 0.0
    ranked = CostPolicy(MODEL).rank(asked, pool, Random(0))
    assert {item.candidate.worker.id for item in ranked} == {worker.id for worker in workers}
    for item in ranked:
        expected = terms[workers.index(item.candidate.worker)]
        assert item.parts == pytest.approx({k: s for k, s in expected.items() if k in item.parts})
        assert not any(s for k, s in expected.items() if k not in item.parts)
        assert item.cost == pytest.approx(sum(expected.values()))
    rounded = [round(item.cost, 4) for item in ranked]
    assert all(a <= b + 1e-4 for a, b in pairwise(rounded))
