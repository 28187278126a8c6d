"""What is known of the workers' caches: index, promises, what was learned, and how far to trust it.

Trust per worker is kept in :mod:`gateway.trust`; what is learned, and where in the index it stands,
in :mod:`gateway.learnedplaces`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gateway.decision import Overlap
from gateway.expectation import Delivered, Expectation, text_tokens
from gateway.ghosts import GhostMemory
from gateway.held import Held
from gateway.hindsight import Hindsight
from gateway.index.base import Applied, Match, PrefixIndex
from gateway.learn import Served
from gateway.learned import Fact
from gateway.learnedplaces import LearnedPlaces, aside, place_of
from gateway.member import Member
from gateway.parity import Parity
from gateway.promises import Promise, Promises
from gateway.routing.base import BLIND, EXACT, LEARNED, Candidate, Query, Trust
from gateway.routing.branches import NOBODY, Branches
from gateway.scopes import Scopes
from gateway.trust import NO_FEED, TrustBook, TrustChange
from gateway.trustwatch import Compared
from shared.blocks import GRANULE, usable_tokens
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
        self._matched: tuple[Sequence[BlockKey], Mapping[WorkerId, Match]] = (), {}
        """The prompt that was looked up last, and where it was found."""
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

    def look_up(
        self,
        query: Query,
        serving: Sequence[Member],
        exclude: Collection[WorkerId],
        now: float,
    ) -> Held:
        """Usable tokens everywhere. Promises on ``exclude`` are the request's own: not counted."""
        keys, text = query.keys, not query.prompt_tokens
        trust: dict[WorkerId, Trust] = {}
        usable: dict[WorkerId, int] = {}
        promised: dict[WorkerId, int] = {}
        host: dict[WorkerId, int] = {}
        watch_of = self._trust.watch
        if not keys:
            self._matched = keys, {}
            for member in serving:
                watch = watch_of(member.id)
                state = BLIND if watch is None else watch.state
                trust[member.id] = LEARNED if text and state is EXACT else state
                usable[member.id] = 0
            return Held(query.prompt_tokens, usable, host, promised, trust, 0, NOBODY)
        total = query.prompt_tokens or text_tokens(query)
        matches = self._index.match(keys)
        self._matched = keys, matches
        self._promises.expire(now)
        expected = self._promises.workers()
        stride = serving[0].stride
        for member in serving:
            worker, granules, tokens = member.id, 0, 0
            if member.stride < stride:
                stride = member.stride
            watch = watch_of(worker)
            state = BLIND if watch is None else watch.state
            # Events never speak of text.
            trust[worker] = LEARNED if text and state is EXACT else state
            if watch is not None and state is not BLIND:
                beside = watch.told is EXACT and (text or state is not EXACT)
                match = matches.get(aside(worker) if beside else worker)
                if match is not None:
                    granules = match.tokens // GRANULE
                    tokens = _usable(member, granules, total)
                    if match.host_tokens:
                        on_device = (match.tokens - match.host_tokens) // GRANULE
                        host[worker] = tokens - _usable(member, on_device, total)
                if worker in expected and worker not in exclude:
                    ahead = self._promises.extend(worker, keys, granules)
                    if ahead > granules:
                        more = _usable(member, ahead, total)
                        promised[worker] = more - tokens
                        tokens = more
            usable[worker] = tokens
        seen = self._ghosts.seen(keys) // stride * stride * GRANULE
        salted = query.plain_keys or self._scopes.in_use
        isolated = self._isolated(query, serving, total) if salted else {}
        popularity = self._branches.popularity(keys)
        return Held(total, usable, host, promised, trust, seen, popularity, isolated)

    def _isolated(
        self, query: Query, serving: Sequence[Member], total: int
    ) -> Mapping[WorkerId, int]:
        """What workers hold of the same tokens without a salt, or under another one."""
        salted = bool(query.plain_keys)
        plain = query.plain_keys if salted else query.keys
        found: dict[WorkerId, int] = {}
        copies = self._scopes.copies(plain)
        for keys in (plain if salted else (), copies):
            matches = self._index.match(keys) if keys else {}
            for member in serving:
                match = matches.get(member.id) or matches.get(aside(member.id))
                if match is not None:
                    tokens = _usable(member, match.tokens // GRANULE, total)
                    found[member.id] = max(found.get(member.id, 0), tokens)
        return found

    def asked(self, query: Query, overlap: Overlap, holders: Collection[WorkerId]) -> None:
        """A request begins; ``overlap`` is as it was decided, and ``holders`` have the most of it.

        Branches are those of the prompts that this gateway has met. A conversation that another one
        served until now looks like a branch of its own past, and it is none.
        """
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

    def promise(self, query: Query, candidate: Candidate, now: float) -> Promise:
        """The prompt was booked on a worker."""
        indexed = (candidate.matched_tokens - candidate.promised_tokens) // GRANULE
        blind = candidate.worker.trust is BLIND  # nobody looks for promises there
        keys = () if blind else query.keys
        return self._promises.make(candidate.worker.id, keys, indexed, now)

    def keep(self, promise: Promise, expected: Expectation, now: float) -> None:
        """The prompt was computed. Its events are on their way; what is learned is known now."""
        if expected.place is None:
            self._promises.keep(promise, now)
        else:
            self._promises.break_off(promise)

    def break_off(self, promise: Promise) -> None:
        """It was not."""
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
            other = self._match_at(place, query, member)
        elif place != worker and not text:
            other = events = self._match_at(worker, query, member)
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

    def _match_at(self, place: WorkerId, query: Query, member: Member) -> int:
        keys, matches = self._matched
        if keys is not query.keys:
            matches = self._index.match(query.keys)
        match = matches.get(place)
        granules = 0 if match is None else match.tokens // GRANULE
        return _usable(member, granules, query.prompt_tokens or text_tokens(query))

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

    def told(self, member: Member, fact: Fact) -> None:
        """Another gateway saw this worker answer, or restart."""
        if keys := self._learned.told(member, fact):
            self._branches.asked(keys, self._ghosts.seen(keys))
            self._ghosts.remember(keys)

    def _comparable(self, member: Member, delivered: Delivered) -> bool:
        """Text on a worker whose events flow says nothing about these."""
        return not delivered.text or self._trust.feed_state(member.id) is not EXACT


def _usable(member: Member, granules: int, prompt_tokens: int) -> int:
    """Granules held -> tokens that the worker can reuse: whole blocks, without the last token."""
    if not granules:
        return 0
    # Units of keys are whole blocks: nothing else to be rounded down as in `usable_tokens`.
    stride = member.stride
    whole = granules // stride * stride * GRANULE
    return usable_tokens(whole, prompt_tokens, member.info.block_size)
