"""A decision and its booking: what each worker has of a prompt, what it costs there, who is best.

decide = look up -> candidates -> rank          book = what the winner has to do from now on
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from random import Random

from gateway.booking import Booking
from gateway.decision import Reject, Route
from gateway.fleet import Fleet
from gateway.held import Held
from gateway.knowledge import Knowledge
from gateway.lease import Attempt
from gateway.member import Member
from gateway.records import Shadow
from gateway.routing.base import READY, Candidate, Policy, Query, WorkerState
from gateway.routing.cost import CostModel
from shared.errors import ApiError, ModelNotFound, NoCapacity
from shared.types import WorkerId

_RETRY_AFTER_S = 1.0
_HOLDERS = 4
"""Holders of one prompt that are asked who brought it there."""


class Decider:
    """Owns nothing: reads fleet and knowledge, and books there."""

    def __init__(
        self, fleet: Fleet, knowledge: Knowledge, cost: CostModel, timer: Callable[[], float]
    ) -> None:
        """``timer``: measures the look-up."""
        self._fleet, self._knowledge, self._cost, self._timer = fleet, knowledge, cost, timer

    def decide(
        self,
        query: Query,
        now: float,
        policy: Policy,
        rng: Random,
        exclude: Collection[WorkerId],
        turn_number: int,
    ) -> Route | Reject:
        """Rank the workers for a request; changes nothing but the states of policy and RNG.

        :param turn_number: of whom round robin would have taken.
        """
        serving = self._fleet.serving(query.model)
        pool = [member for member in serving if member.state(now) is READY]
        members = [member for member in pool if member.id not in exclude] if exclude else pool
        ready = bool(members)
        if not members:
            # Where only those are left that rest after failures, trying one beats refusing.
            pool += [m for m in serving if m.state(now) is WorkerState.EJECTED]
            members = [member for member in pool if member.id not in exclude]
        if not members:
            # A model that nobody named yet may come with the first worker.
            known = bool(serving) or not self._fleet.models()
            return self._reject(query, bool(pool), known)
        begun = self._timer()
        held = self._knowledge.lookup.held(query, serving, exclude, now)
        lookup_s = self._timer() - begun
        candidates = self._candidates(query, members, held, now, READY if ready else None)
        order = policy.rank(query, candidates, rng)
        best = order[0].candidate
        ttft_s = self._cost.expected_ttft_s(query, best)
        turn = candidates[turn_number % len(candidates)]
        turn_s = ttft_s if turn is best else self._cost.expected_ttft_s(query, turn)
        return Route(
            query=query,
            policy=policy.name,
            order=tuple(order),
            overlap=held.overlap(serving, pool),
            decided=now,
            predicted_ttft_s=ttft_s,
            # for the report's counterfactual
            round_robin=Shadow(matched_tokens=turn.matched_tokens, ttft_s=turn_s),
            lookup_s=lookup_s,
        )

    def _candidates(
        self,
        query: Query,
        members: Sequence[Member],
        held: Held,
        now: float,
        state: WorkerState | None,
    ) -> list[Candidate]:
        output = self._expected_output(query, members[0].pool)
        shared = held.popularity if held.popularity.runs else None
        usable, promised, host = held.usable, held.promised, held.host
        need, made = held.prompt_tokens, []
        for view in self._fleet.views(members, held.trust, now, state):
            worker = view.id
            matched, loaded = usable[worker], host.get(worker, 0) if host else 0
            fresh = need - matched + loaded
            # In the order of the fields: so many names would take twice as long.
            candidate = Candidate(
                view,
                matched,
                promised.get(worker, 0) if promised else 0,
                shared.shared_tokens(matched) if shared else 0.0,
                shared.branches(matched) if shared else 1.0,
                fresh + output if fresh > 0 else output,  # new_kv_tokens
                loaded,  # host_tokens
            )
            made.append(candidate)
        return made

    @staticmethod
    def _reject(query: Query, tried: bool, known: bool) -> Reject:
        if tried:
            error: ApiError = NoCapacity("All workers were tried.", retry_after_s=_RETRY_AFTER_S)
            return Reject(error, "all_tried")
        if known:
            message = f"No worker for '{query.model}' is ready."
            return Reject(NoCapacity(message, retry_after_s=_RETRY_AFTER_S), "no_worker")
        message = f"The model '{query.model[:128]}' does not exist or is not served here."
        return Reject(ModelNotFound(message, param="model"), "model_not_found")

    def book(self, route: Route, member: Member, now: float, attempt: int) -> Attempt:
        """Book a decision's worker."""
        query, candidate = route.query, route.order[0].candidate
        own = self._cost.own_s(query, candidate)
        output = self._expected_output(query, member.pool)
        decode_s = output * member.token_s()
        booking = Booking(
            prefill_s=own,
            kv_tokens=query.prompt_tokens + output,
            begun=now,
            wait_s=candidate.worker.booked_prefill_s,
            expected_s=route.predicted_ttft_s + decode_s,
            bound=_bound(route) if candidate.matched_tokens else 0.0,
            probe=member.breaker.until is not None and member.breaker.begin(now),
        )
        self._fleet.book(member, booking)
        expectation = self._knowledge.expect(query, candidate, member, route.decided)
        if attempt == 1:
            self._knowledge.asked(query, route.overlap, _holders(route))
        promises = self._knowledge.promise(query, candidate, now)
        return Attempt(
            route=route,
            number=attempt,
            member=member,
            booking=booking,
            promises=promises,
            expectation=expectation,
        )

    def _expected_output(self, query: Query, pool: str) -> int:
        usual, most = int(self._fleet.outputs.usual(pool, query.tenant)), query.max_tokens
        return most if 0 < most < usual else usual


def _holders(route: Route) -> list[WorkerId]:
    """Workers that hold most of the prompt, a few at most; nobody if this gateway has seen all of
    that itself."""
    most = route.overlap.available_tokens
    if most <= route.overlap.seen_tokens:
        return []
    holding = (item.candidate for item in route.order if item.candidate.matched_tokens == most)
    return [candidate.worker.id for candidate in islice(holding, _HOLDERS)]


def _bound(route: Route) -> float:
    """Share of the prompt that the chosen worker, which holds some of it, holds alone, 0..1."""
    matched, elsewhere = route.order[0].candidate.matched_tokens, 0
    for item in route.order[1:]:
        if item.candidate.matched_tokens > elsewhere:
            elsewhere = item.candidate.matched_tokens
    return (
        (matched - elsewhere) / (route.query.prompt_tokens or matched)
        if matched > elsewhere
        else 0.0
    )
