"""One attempt on one worker: booked from ``Router.begin`` until its end, released exactly once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.accounting import account
from gateway.booking import Booking, Speaker
from gateway.decision import AttemptEnd, Overlap, Route
from gateway.expectation import Expectation, text_tokens
from gateway.member import Member
from gateway.promises import Promise
from gateway.reasons import REJECTED, why
from gateway.records import Outcome, RequestRecord, Shadow, TokenFlow, Why
from gateway.routing.base import Query
from shared import dialogue
from shared.errors import ApiError
from shared.openai import Usage
from shared.types import WorkerId

_FAMILY_GRANULES = 4
_PATH_GRANULES = tuple(8 << doubling for doubling in range(16))


def family_of(query: Query) -> str:
    """Eight hex digits that prompts with one beginning share.

    Taken from the key after 64 tokens: beyond a chat template's opening and a stock first sentence,
    yet inside most system prompts. Prompts shorter than that go by their first key.
    """
    if not query.keys:
        return ""
    at = _FAMILY_GRANULES - 1 if len(query.keys) >= _FAMILY_GRANULES else 0
    return f"{query.keys[at] & 0xFFFFFFFF:08x}"


def path_of(query: Query) -> tuple[int, ...]:
    """Where the prompt goes on after its family: its keys after 128, 256, 512, ... tokens."""
    keys = query.keys
    size = len(keys)
    if size < _PATH_GRANULES[0]:
        return ()
    path: list[int] = []
    for granules in _PATH_GRANULES:
        if granules > size:
            break
        path.append(keys[granules - 1] & 0xFFFFFFFF)
    return tuple(path)


class Attempt(msgspec.Struct, eq=False, kw_only=True):
    """What was booked for an attempt, and what is known of it so far."""

    route: Route
    number: int
    member: Member
    booking: Booking
    promises: tuple[Promise, ...]
    expectation: Expectation
    first_token: float | None = None


class Lease:
    """Handed to whoever carries the attempt out; :meth:`finish` must be called on every way out."""

    def __init__(
        self,
        attempt: Attempt,
        on_first_token: Callable[[Attempt, float, Speaker | None], None],
        on_finish: Callable[[Attempt, AttemptEnd, float], None],
    ) -> None:
        self._attempt = attempt
        self.worker: WorkerId = attempt.route.order[0].candidate.worker.id
        """The worker that is being tried."""
        self.url: str = attempt.member.info.url
        """Its base URL when the attempt began."""
        self._on_first_token = on_first_token
        self._on_finish = on_finish
        self._record: RequestRecord | None = None

    def __repr__(self) -> str:
        state = "open" if self._record is None else self._record.outcome
        return f"Lease({self._attempt.number} on {self.worker}, {state})"

    @property
    def engine(self) -> str:
        """What serves there."""
        return self._attempt.member.info.engine

    @property
    def route(self) -> Route:
        """The decision behind it."""
        return self._attempt.route

    def first_token(self, now: float, speaker: Speaker | None = None) -> None:
        """The first content arrived: its prefill is done. Later calls change nothing.

        :param speaker: tells whether the answer goes on, if somebody knows.
        """
        if self._attempt.first_token is None and self._record is None:
            self._attempt.first_token = now
            self._on_first_token(self._attempt, now, speaker)

    def finish(self, end: AttemptEnd, now: float) -> RequestRecord:
        """Release what was booked and say what happened. A second call returns the same record."""
        if self._record is None:
            # First of all: whatever follows, the end is told only once.
            self._record = make_record(self._attempt, end, now)
            self._on_finish(self._attempt, end, now)
        return self._record


def make_record(attempt: Attempt, end: AttemptEnd, now: float) -> RequestRecord:
    """The fact that an attempt leaves. Pure."""
    route, usage = attempt.route, end.usage
    query, chosen = route.query, route.order[0].candidate
    cached = None if usage is None else usage.cached
    reports = attempt.member.reports_cached and end.route not in dialogue.ROUTES
    if usage is not None and cached is None and reports:
        cached = 0  # some engines leave it out where it is 0
    # What a worker refused was not prefilled, so it has no tokens, as if it had been rejected here.
    if end.final and end.outcome is not Outcome.CLIENT_ERROR:
        overlap, captured = _in_engine_tokens(route, usage)
        flow = account(
            overlap,
            prompt_tokens=query.prompt_tokens,
            captured_tokens=captured,
            policy=route.policy,
            usage_prompt=None if usage is None else usage.prompt,
            usage_cached=cached,
        )
    else:
        flow = TokenFlow()
    decided_s = route.decided - query.arrived
    first = attempt.first_token
    return RequestRecord(
        at=end.wall_at,
        request_id=query.request_id,
        attempt=attempt.number,
        final=end.final,
        route=end.route,
        model=query.model,
        tenant=query.tenant,
        family=family_of(query),
        path=path_of(query),
        policy=route.policy,
        worker=chosen.worker.id,
        trust=chosen.worker.trust,
        outcome=end.outcome,
        status=end.status,
        flow=flow,
        output_tokens=end.output_tokens if usage is None else usage.completion,
        decided_s=decided_s,
        ttft_s=None if first is None else first - query.arrived,
        total_s=now - query.arrived,
        itl_s=end.itl_s,
        predicted_ttft_s=decided_s + route.predicted_ttft_s,
        reported=cached is not None,
        prompt_tokens=query.prompt_tokens,
        matched_tokens=chosen.matched_tokens,
        client_id=end.client_id,
        why=why(route),
        round_robin=_since_arrival(route.round_robin, decided_s),
    )


def _since_arrival(shadow: Shadow | None, decided_s: float) -> Shadow | None:
    if shadow is None:
        return None
    return Shadow(matched_tokens=shadow.matched_tokens, ttft_s=decided_s + shadow.ttft_s)


def _in_engine_tokens(route: Route, usage: Usage | None) -> tuple[Overlap, int]:
    """Overlap and captured tokens; those of a prompt known as text become the engine's."""
    query, overlap = route.query, route.overlap
    captured = route.order[0].candidate.matched_tokens
    if query.prompt_tokens or not query.keys or usage is None or usage.prompt <= 0:
        return overlap, captured
    seen, available, draining = (
        overlap.seen_tokens,
        overlap.available_tokens,
        overlap.draining_tokens,
    )
    if not (seen or available):  # nothing to be scaled: no part exceeds these
        return overlap, captured
    scale = usage.prompt / text_tokens(query)
    scaled = Overlap(
        matchable_tokens=overlap.matchable_tokens,
        block_size=overlap.block_size,
        seen_tokens=round(seen * scale),
        available_tokens=round(available * scale),
        draining_tokens=round(draining * scale) if draining else 0,
        isolated_tokens=overlap.isolated_tokens,
    )
    return scaled, round(captured * scale) if captured else 0


def rejection_record(
    query: Query | None, route: str, error: ApiError, now: float, wall_at: float
) -> RequestRecord:
    """The record of a request that reached no worker: nothing was prefilled, so no tokens. Pure."""
    waited = 0.0 if query is None else now - query.arrived
    return RequestRecord(
        at=wall_at,
        request_id="" if query is None else query.request_id,
        attempt=0,
        final=True,
        route=route,
        model="" if query is None else query.model,
        tenant="" if query is None else query.tenant,
        family="" if query is None else family_of(query),
        outcome=Outcome.REJECTED,
        status=error.status,
        decided_s=waited,
        total_s=waited,
        prompt_tokens=0 if query is None else query.prompt_tokens,
        why=Why(code=REJECTED),
    )
