"""What follows from the beginning, the first token and the end of an attempt."""

from __future__ import annotations

from gateway.booking import Speaker
from gateway.decision import AttemptEnd
from gateway.expectation import Delivered
from gateway.fleet import Fleet
from gateway.knowledge import Knowledge
from gateway.lease import Attempt, Lease
from gateway.records import OK, Outcome
from gateway.routing.rates import PrefillSample, RateBook
from shared import dialogue
from shared.openai import Usage

_PATIENCE = 4.0
_MIN_PATIENCE_S = 5.0
_INSTANT_TOKENS = 2
"""An answer this short ends practically when its prefill does."""


class Outcomes:
    """Applies attempts to fleet, rates and knowledge."""

    def __init__(self, fleet: Fleet, rates: RateBook, knowledge: Knowledge) -> None:
        self._fleet = fleet
        self._rates = rates
        self._knowledge = knowledge

    def begin(self, attempt: Attempt) -> Lease:
        """The lease of an attempt that has been booked."""
        return Lease(attempt, self._first_token, self._finish)

    def _first_token(self, attempt: Attempt, now: float, speaker: Speaker | None) -> None:
        member = attempt.member
        member.answered = now
        member.start_decoding(attempt.booking, now, speaker)
        self._fleet.served_at_once(member, member.served_with(attempt.booking))

    def _finish(self, attempt: Attempt, end: AttemptEnd, now: float) -> None:
        member, booking, outcome = attempt.member, attempt.booking, end.outcome
        answered = outcome is OK
        if answered:
            member.answered = now
            self._fleet.served_at_once(member, member.served_with(booking))
        failed = not answered and self._worker_failed(attempt, end, now)
        if not member.release(booking, now, failed=failed):
            return
        if failed:
            may_eject = self._fleet.may_eject(member, now)
            lost_s = now - booking.begun
            member.breaker.fail(now, lost_s=lost_s, probe=booking.probe, may_eject=may_eject)
            self._knowledge.break_off(attempt.promises)
            return
        computed = answered or attempt.first_token is not None
        if computed or outcome is Outcome.CLIENT_ERROR:
            member.breaker.succeed(probe=booking.probe)
        else:
            member.breaker.give_up(probe=booking.probe)
        if computed:
            self._knowledge.keep(attempt.promises, attempt.expectation, now)
            self._learn(attempt, end, now)
        else:
            self._knowledge.break_off(attempt.promises)

    @staticmethod
    def _worker_failed(attempt: Attempt, end: AttemptEnd, now: float) -> bool:
        """Whether the end is the worker's fault. Client errors are not; being very late is.

        Silence alone is not: an answer that is no stream says nothing until it is whole. Were busy
        workers to rest for it, the others would get all that they had, and rest next.
        """
        outcome, booking = end.outcome, attempt.booking
        if attempt.first_token is not None or not (outcome is Outcome.DEADLINE or end.silent):
            return outcome is Outcome.UPSTREAM_ERROR
        patience_s = max(_MIN_PATIENCE_S, _PATIENCE * booking.expected_s)
        if end.silent:
            if attempt.member.answered <= booking.begun:
                return True
            longest_s = attempt.route.query.max_tokens * attempt.member.token_s()
            patience_s = max(patience_s, longest_s)
        return now - booking.begun > patience_s

    def _learn(self, attempt: Attempt, end: AttemptEnd, now: float) -> None:
        member, query, usage = attempt.member, attempt.route.query, end.usage
        output = end.output_tokens if usage is None else usage.completion
        answered = end.outcome is OK
        if answered:
            self._fleet.outputs.observe(member.pool, query.tenant, output)
        if end.itl_s is not None:
            member.observe_tpot(end.itl_s)
        if self._fleet.get(member.id) is not member:
            # It left, or is another incarnation by now: what this one holds is of no use.
            return
        if answered:
            self._fleet.observe_service(member, attempt.booking, now)
            self._sample(attempt, usage, output, now)
        # Engines that tell what was cached elsewhere need not on these routes.
        dialogues = end.route in dialogue.ROUTES
        silent = dialogues and (usage is None or usage.cached is None)
        self._knowledge.served(
            member,
            query,
            attempt.expectation,
            Delivered.of(query, usage, output, reports=member.reports_cached and not dialogues),
            # After a failed attempt elsewhere, or without its end, an answer proves nothing.
            judge=answered and attempt.number == 1 and not silent,
            now=now,
        )

    def _sample(self, attempt: Attempt, usage: Usage | None, output: int, now: float) -> None:
        """A rate sample of an answer, where the time of the first token is known."""
        first, route = attempt.first_token, attempt.route
        if first is None:
            if output > _INSTANT_TOKENS:
                return
            first = now
        total = usage.prompt if usage is not None else route.query.prompt_tokens
        if total <= 0:
            return
        candidate, booking = route.order[0].candidate, attempt.booking
        cached = candidate.matched_tokens
        if usage is not None and usage.cached is not None:
            cached = usage.cached
        sample = PrefillSample(
            uncached=max(1, total - cached),
            total=total,
            ttft_s=first - booking.begun,
            wait_s=booking.wait_s + candidate.load_s if candidate.host_tokens else booking.wait_s,
        )
        self._rates.observe(attempt.member.pool, attempt.member.id, sample, now)
