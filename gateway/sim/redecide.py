"""Recorded decisions taken again: the same candidates, as they were, under other policies. Pure.

Nothing is simulated here: each decision stands for itself, in the caches that the recorded ones
had made. So a policy that recorded them must come to the same, and the difference in predicted
times is what a single other choice would have cost or saved, not what the policy as a whole would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import msgspec

from gateway.config import RoutingConfig
from gateway.routing.base import Candidate, Query
from gateway.routing.cost import CostModel
from gateway.sim.replay import Factory
from gateway.tracefile import Traced
from shared.types import BlockKey, RequestId


class Redecided(msgspec.Struct, frozen=True):
    """One policy over all recorded decisions."""

    policy: str
    decisions: int
    same: int
    """It chose the worker that was chosen."""
    ttft_s: float
    """Mean predicted time to first token of its choices."""
    recorded_ttft_s: float
    """The same of the recorded ones: predicted too, from the same figures."""
    matched_tokens: int
    recorded_matched_tokens: int


def redecide(
    requests: Sequence[Traced], policies: Mapping[str, Factory], seed: int
) -> list[Redecided]:
    """Empty if no decision was recorded. Requests in the order in which they came."""
    kept = [one for one in requests if one.candidates]
    if not kept:
        return []
    return [_redecided(name, factory, kept, seed) for name, factory in policies.items()]


def _redecided(name: str, factory: Factory, requests: Sequence[Traced], seed: int) -> Redecided:
    cost, rng = CostModel(), Random(seed)
    policy = factory(RoutingConfig(), cost)
    same = matched = recorded_matched = 0
    ttft = recorded_ttft = 0.0
    for one in requests:
        query = _query(one)
        # The order in which the router offers them; in the file the best stands first.
        offered = sorted(one.candidates, key=lambda candidate: candidate.worker.id)
        chosen = policy.rank(query, offered, rng)[0].candidate
        before = _chosen(one)
        same += chosen.worker.id == before.worker.id
        ttft += cost.expected_ttft_s(query, chosen)
        recorded_ttft += cost.expected_ttft_s(query, before)
        matched += chosen.matched_tokens
        recorded_matched += before.matched_tokens
    count = len(requests)
    return Redecided(
        policy=name,
        decisions=count,
        same=same,
        ttft_s=ttft / count,
        recorded_ttft_s=recorded_ttft / count,
        matched_tokens=matched,
        recorded_matched_tokens=recorded_matched,
    )


def _chosen(one: Traced) -> Candidate:
    """Who answered: the first choice, unless that one failed."""
    found = (candidate for candidate in one.candidates if candidate.worker.id == one.worker)
    return next(found, one.candidates[0])


def _query(one: Traced) -> Query:
    return Query(
        request_id=RequestId(one.id),
        model=one.model,
        prompt_tokens=one.prompt_tokens,
        max_tokens=one.max_tokens,
        arrived=one.at,
        keys=[BlockKey(key) for key in one.keys],
        session=one.session,
    )
