"""What is known of the workers' caches: index, promises, what was learned, and how far to trust it.

Trust per worker is kept in :mod:`gateway.trust`; what is learned, and where in the index it stands,
in :mod:`gateway.learnedplaces`; prompts are looked up in :mod:`gateway.lookup`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from gateway.decision import Overlap
from gateway.expectation import Delivered, Expectation, text_tokens
from gateway.ghosts import GhostMemory
from gateway.hindsight import Hindsight
from gateway.index.base import Applied, PrefixIndex
from gateway.learn import Served
from gateway.learned import Fact
from gateway.learnedplaces import LearnedPlaces, aside, place_of
from gateway.lookup import LookUp
from gateway.member import Member
from gateway.parity import Parity
from gateway.promises import Promise, Promises
from gateway.routing.base import BLIND, EXACT, Candidate, Query, Trust
from gateway.routing.branches import Branches
from gateway.scopes import Scopes
from gateway.trust import NO_FEED, TrustBook, TrustChange
from gateway.trustwatch import Compared
from shared.blocks import GRANULE
from shared.events import EventBatch
from shared.types import BlockKey, Tier, WorkerId

_WORKER = "worker"
_WATCHED = 32
"""Of prompts on a worker that is not believed, so many blocks are followed: enough to see whether
what it should hold is delivered again."""
_LEAST_SLACK = 2 * GRANULE
_SLACK_SHARE = 8
"""Blocks of text: a token is not always four bytes, so an eighth of a prompt is within reason."""


class Knowledge:
    """Owns promises, ghosts, learner and trust; drives the index."""

    def __init__(
        self,
        index: PrefixIndex,
        ghost_keys: int,
        on_trust: Callable[[TrustChange], None] = lambda change: None,
    ) -> None:
        self._index = index
        self._on_trust = on_trust
        self._trust = TrustBook(self._trust_changed)
        self._promises = Promises()
        self._ghosts = GhostMemory(ghost_keys)
        self._scopes = Scopes(max(1, ghost_keys // 8))
        self._branches = Branches(max(1, ghost_keys // 16))
        self._learned = LearnedPlaces(index)
        self._hindsight = Hindsight(index, self._trust)
        self.lookup = LookUp(
            index, self._trust, self._promises, self._ghosts, self._scopes, self._branches
        )
        self.outbox = self._learned.outbox

    # ---------------------------------------------------------------- workers

    def join(self, member: Member, *, fresh: bool) -> None:
        """A worker is there; ``fresh``: nothing of what was known of it holds."""
        if fresh:
            self._promises.forget(member.id)
            self._hindsight.forget(member.id)
            self._learned.begin(member)
            member.parity = Parity()
            feed = "no cache events yet" if member.info.event_feed else NO_FEED
            self._trust.join(member.id, cacheless=not member.info.prefix_cache, reason=feed)
        self._join_index(member)

    def _join_index(self, member: Member) -> None:
        self._index.join(
            member.id, member.info.epoch, member.stride, closed=member.evicts_leaves_first
        )
        self._learned.attach(member)

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone, and its contents with it."""
        self._promises.forget(worker)
        self._learned.forget(worker)
        self._index.forget(worker)
        self._hindsight.forget(worker)
        self._trust.forget(worker)

    def resize(self, member: Member) -> None:
        """A worker may have told its capacity."""
        self._learned.resize(member)

    @property
    def trust(self) -> TrustBook:
        """How far the index is believed for each worker, and why."""
        return self._trust

    def capacity_tokens(self, member: Member) -> int:
        """What its cache holds as far as was learned; 0: nothing was. Pure."""
        place = place_of(member.id, *self._trust.states(member.id), text=False)
        return 0 if place is None else self._learned.capacity_tokens(place)

    def feed_says(self, worker: WorkerId, trust: Trust, reason: str, now: float) -> None:
        """Whoever follows the worker's feed says how far it can be believed."""
        self._hindsight.settle(worker, now)
        if trust is Trust.EXACT and self._trust.feed_state(worker) is not Trust.EXACT:
            self._learned.give_way(worker)
        self._trust.told(worker, trust, reason)

    def flush(self, member: Member) -> int:
        """Forget what a worker holds; how many index entries that were."""
        worker = member.id
        entries = self.entries(worker)
        self._promises.forget(worker)
        self._learned.empty(member)
        self._index.forget(worker)
        self._join_index(member)
        if member.info.event_feed:
            self._trust.told(worker, Trust.LEARNED, "its contents were flushed")
        return entries

    def entries(self, worker: WorkerId, *, beside: bool = False) -> int:
        """Index entries of a worker; ``beside``: of what was learned beside its events. Pure."""
        place = aside(worker) if beside else worker
        return self._index.blocks(place) + self._index.blocks(place, Tier.HOST)

    @property
    def sizes(self) -> tuple[int, int]:
        """Blocks remembered as seen, and prefixes below which prompts have branched."""
        return len(self._ghosts), len(self._branches)

    def _trust_changed(self, change: TrustChange) -> None:
        if change.after is Trust.EXACT:
            self._learned.leave_aside(change.worker)
        self._on_trust(change)

    def apply(self, batch: EventBatch, member: Member | None, now: float) -> Applied:
        """Cache events. A gap lowers trust at once; only who follows the feed can raise it, since
        a batch that fits says nothing about how many more are on their way."""
        applied = self._index.apply(batch)
        if member is None or batch.source != _WORKER or batch.epoch != member.info.epoch:
            return applied
        if applied.ok:
            self._hindsight.heard(batch, now)
        elif self._trust.feed_state(member.id) is Trust.EXACT:
            self._trust.told(member.id, Trust.LEARNED, "gap in its events")
        return applied

    # ---------------------------------------------------------------- prompts

    def asked(self, query: Query, overlap: Overlap, holders: Collection[WorkerId]) -> None:
        """A request begins; ``overlap`` is as it was decided, and ``holders`` have the most of it.

        Branches are those of the prompts that this gateway has met. A conversation that another one
        served until now looks like a branch of its own past, and it is none.
        """
        if query.prompts:
            for one in query.prompts:  # where how much of each was is not known any more
                self._branches.asked(one.keys, self._ghosts.seen(one.keys))
            return
        keys, seen = query.keys, overlap.seen_tokens // GRANULE
        known = overlap.available_tokens // GRANULE
        if known > seen:
            known = min(known, self._reach(keys, known, holders))
        self._branches.asked(keys, known if known > seen else seen)

    def _reach(self, keys: Sequence[BlockKey], known: int, holders: Collection[WorkerId]) -> int:
        """Up to where prompts met here, and their answers, are the same."""
        seen = self._ghosts.seen(keys)
        if seen and self._branches.ended(keys[seen - 1]):
            return known
        reach = self._promises.reach
        return max((reach(worker, keys, seen, known) for worker in holders), default=seen)

    def promise(self, query: Query, candidate: Candidate, now: float) -> tuple[Promise, ...]:
        """The prompt was booked on a worker; of a list, each."""
        worker, make = candidate.worker.id, self._promises.make
        blind = candidate.worker.trust is BLIND  # nobody looks for promises there
        if query.prompts:
            # How much is indexed of which one is not known any more: from their beginnings on.
            return () if blind else tuple(make(worker, one.keys, 0, now) for one in query.prompts)
        indexed = (candidate.matched_tokens - candidate.promised_tokens) // GRANULE
        return (make(worker, () if blind else query.keys, indexed, now),)

    def keep(self, promised: Iterable[Promise], expected: Expectation, now: float) -> None:
        """The prompt was computed. Its events are on their way; what is learned is known now."""
        if expected.place is not None:
            self.break_off(promised)
            return
        for promise in promised:
            self._promises.keep(promise, now)

    def break_off(self, promised: Iterable[Promise]) -> None:
        """It was not."""
        for promise in promised:
            self._promises.break_off(promise)

    def expect(
        self, query: Query, candidate: Candidate, member: Member, decided: float
    ) -> Expectation:
        """What is predicted, to be compared with what will be delivered. Pure."""
        worker, text = member.id, not query.prompt_tokens
        state, told, version = self._trust.circumstances(worker)
        place = place_of(worker, state, told, text=text)
        most = candidate.matched_tokens
        # What is only promised proves nothing: the request may overlap its leader.
        least = most - candidate.promised_tokens
        if place is None:
            return Expectation(
                None, least, most, None, None, least, decided, version, member.stride
            )
        other = events = None
        if state is BLIND:
            other = self.lookup.at(place, query, member)
        elif place != worker and not text:
            other = events = self.lookup.at(worker, query, member)
        return Expectation(
            place=place,
            least=least,
            most=most,
            other=other,
            clock=self._learned.clock(place),
            told=events,
            decided=decided,
            version=version,
            stride=member.stride,
        )

    def served(
        self,
        member: Member,
        query: Query,
        expected: Expectation,
        delivered: Delivered,
        *,
        judge: bool,
        now: float,
    ) -> None:
        """A prompt was computed and answered.

        :param judge: what was delivered can be held against what was predicted.
        """
        if query.prompts:
            self._served_list(member, query, expected, delivered, judge=judge, now=now)
            return
        keys, worker = query.keys, member.id
        if not keys:
            return
        self._ghosts.remember(keys)
        if query.plain_keys:
            self._scopes.remember(query.plain_keys, keys)
        if not member.info.prefix_cache:
            return
        cached, slack = delivered.cached_tokens, 0
        if delivered.text:
            slack = delivered.prompt_tokens // _SLACK_SHARE
            slack = slack if slack > _LEAST_SLACK else _LEAST_SLACK
        other = expected.other or 0
        likely = other if other > expected.least else expected.least
        if judge:
            member.reports_cached = self._trust.answered(worker, cached=cached, expected=likely)
        if judge and cached is not None and self._comparable(member, delivered):
            block = max(member.info.block_size, member.stride * GRANULE, slack)
            if expected.most >= block or cached >= block or other >= block:
                seen = Compared(expected.least, expected.most, expected.other, cached, block)
                self._hindsight.compare(member, query, expected, seen, now)
            else:  # too little to be compared
                self._hindsight.settle(worker, now)
        if expected.place is not None:
            blind = self._trust.states(worker)[0] is BLIND
            request = Served(
                keys=keys[:_WATCHED] if blind else keys,
                prompt_tokens=delivered.prompt_tokens,
                output_tokens=delivered.output_tokens,
                expected_tokens=likely,
                cached_tokens=cached,
                clock=expected.clock if judge else None,
                slack_tokens=slack,
            )
            self._learned.served(member, expected.place, request)

    def _served_list(
        self,
        member: Member,
        query: Query,
        expected: Expectation,
        delivered: Delivered,
        *,
        judge: bool,
        now: float,
    ) -> None:
        """As :meth:`served`. Nothing is compared: who delivered how much of which prompt is not
        said, and some engines tell of one of them only."""
        if judge:
            cached = delivered.cached_tokens
            member.reports_cached = self._trust.answered(member.id, cached=cached, expected=0)
        for one in query.prompts:
            share = Delivered(
                prompt_tokens=one.prompt_tokens or text_tokens(one),
                output_tokens=delivered.output_tokens // len(query.prompts),
                cached_tokens=None,
                text=delivered.text,
            )
            self.served(member, one, expected, share, judge=False, now=now)

    def told(self, member: Member, fact: Fact) -> None:
        """Another gateway saw this worker answer, or restart."""
        if keys := self._learned.told(member, fact):
            self._branches.asked(keys, self._ghosts.seen(keys))
            self._ghosts.remember(keys)

    def _comparable(self, member: Member, delivered: Delivered) -> bool:
        """Text on a worker whose events flow says nothing about these."""
        return not delivered.text or self._trust.feed_state(member.id) is not EXACT
