"""What is known of the workers' caches: index, promises, what was learned, and how far to trust it.

Trust per worker: *exact* while its own events flow without a gap; else *learned* from what was
routed there; *blind* if nothing can be known (no prefix cache, or it never reports what it reused).
Of a blind worker no match is believed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway.accounting import matchable_tokens
from gateway.decision import Overlap
from gateway.ghosts import GhostMemory
from gateway.index.base import Applied, PrefixIndex
from gateway.learn import Learner, Served
from gateway.learned import Fact, Outbox
from gateway.member import Member
from gateway.parity import Parity, Verdict
from gateway.promises import Promise, Promises
from gateway.routing.base import Candidate, Query, Trust, WorkerState
from gateway.routing.branches import Branches, Popularity
from shared.blocks import GRANULE, usable_tokens
from shared.events import EventBatch
from shared.types import WorkerId

_WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Held:
    """Usable tokens of one prompt on each worker that serves its model."""

    prompt_tokens: int
    """As counted, else estimated from the keys."""
    usable: Mapping[WorkerId, int]
    """Promised ones included."""
    host: Mapping[WorkerId, int]
    """The part that is in the worker's host memory, where there is one."""
    promised: Mapping[WorkerId, int]
    """The part that is only promised, where there is one."""
    trust: Mapping[WorkerId, Trust]
    seen_tokens: int
    popularity: Popularity

    def new_kv_tokens(self, worker: WorkerId) -> int:
        """Prompt tokens that need new room on the worker's device."""
        on_device = self.usable[worker] - self.host.get(worker, 0)
        return max(0, self.prompt_tokens - on_device)

    def overlap(
        self, serving: Sequence[Member], open_to: Collection[Member], now: float
    ) -> Overlap:
        """What was available where. ``open_to``: the workers that take new requests."""
        live = [m for m in serving if m.state(now) is not WorkerState.DOWN]
        best = max((self.usable[m.id] for m in live), default=0)
        reachable = max((self.usable[m.id] for m in open_to), default=0)
        sizes = [member.info.block_size for member in live]
        matchable, block_size = matchable_tokens(self.prompt_tokens, sizes or [GRANULE])
        return Overlap(
            matchable_tokens=matchable,
            block_size=block_size,
            seen_tokens=self.seen_tokens,
            available_tokens=best,
            draining_tokens=best - min(best, reachable),
        )


class Knowledge:
    """Owns promises, ghosts and learner; drives the index."""

    def __init__(self, index: PrefixIndex, ghost_keys: int) -> None:
        self._index = index
        self._promises = Promises()
        self._ghosts = GhostMemory(ghost_keys)
        self._branches = Branches(max(1, ghost_keys // 16))
        self._learner = Learner()
        self.outbox = Outbox()
        """What the other gateways should know about workers without cache events."""

    # ---------------------------------------------------------------- workers

    def join(self, member: Member, *, fresh: bool) -> None:
        """A worker is there; ``fresh``: nothing of what was known of it holds."""
        if fresh:
            self._promises.forget(member.id)
            if self._learner.knows(member.id) and not member.info.event_feed:
                self.outbox.put(Fact(member.id, b""))
            self._learner.join(
                member.id, member.info.epoch, member.stride, member.kv_tokens_total()
            )
            feed = "no cache events yet" if member.info.event_feed else "no event feed"
            member.trust, member.trust_reason = Trust.LEARNED, feed
            member.parity = Parity()
        self._index.join(member.id, member.info.epoch, member.stride)

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone, and its contents with it."""
        self._promises.forget(worker)
        self._learner.forget(worker)
        self._index.forget(worker)

    def resize(self, member: Member) -> None:
        """A worker may have told its capacity."""
        self._learner.resize(member.id, member.kv_tokens_total())

    def trust(self, member: Member) -> tuple[Trust, str]:
        """How far the index is believed for a worker, and why. Pure."""
        if not member.info.prefix_cache:
            return Trust.BLIND, "no prefix cache"
        if member.trust is Trust.LEARNED and self._learner.mute(member.id):
            return Trust.BLIND, "it never reports cached_tokens"
        if member.trust is Trust.EXACT and member.parity.verdict is Verdict.DIFFERENT:
            # its events speak of other tokens than our keys are made of
            return Trust.LEARNED, f"its tokens differ: {member.parity.reason}"
        return member.trust, member.trust_reason

    def set_trust(self, member: Member, trust: Trust, reason: str) -> None:
        """Somebody who follows the worker's feed says so."""
        if trust is Trust.EXACT and member.trust is not Trust.EXACT:
            self._learner.reset(member.id)
        member.trust, member.trust_reason = trust, reason

    def apply(self, batch: EventBatch, member: Member | None) -> Applied:
        """Cache events. A gap lowers trust at once; only who follows the feed can raise it, since
        a batch that fits says nothing about how many more are on their way."""
        applied = self._index.apply(batch)
        if member is None or batch.source != _WORKER or batch.epoch != member.info.epoch:
            return applied
        if not applied.ok and member.trust is Trust.EXACT:
            self.set_trust(member, Trust.LEARNED, "gap in its events")
        return applied

    # ---------------------------------------------------------------- prompts

    def look_up(
        self, query: Query, serving: Sequence[Member], exclude: Collection[WorkerId]
    ) -> Held:
        """Usable tokens everywhere. Promises on ``exclude`` are the request's own: not counted."""
        keys = query.keys
        total = query.prompt_tokens or (len(keys) * GRANULE + 1 if keys else 0)
        matches = self._index.match(keys) if keys else {}
        trust = {member.id: self.trust(member)[0] for member in serving}
        usable: dict[WorkerId, int] = {}
        promised: dict[WorkerId, int] = {}
        host: dict[WorkerId, int] = {}
        for member in serving:
            worker = member.id
            usable[worker] = 0
            if not keys or trust[worker] is Trust.BLIND:
                continue
            match = matches.get(worker)
            granules = 0 if match is None else match.tokens // GRANULE
            usable[worker] = _usable(member, granules, total)
            if match is not None and match.host_tokens:
                on_device = (match.tokens - match.host_tokens) // GRANULE
                host[worker] = usable[worker] - _usable(member, on_device, total)
            ahead = granules
            if worker not in exclude:
                ahead = self._promises.extend(worker, keys, granules)
            if ahead > granules:
                more = _usable(member, ahead, total)
                promised[worker] = more - usable[worker]
                usable[worker] = more
        stride = min(member.stride for member in serving)
        seen = self._ghosts.seen(keys) // stride * stride * GRANULE
        return Held(total, usable, host, promised, trust, seen, self._branches.popularity(keys))

    def asked(self, query: Query, overlap: Overlap) -> None:
        """A request begins; ``overlap`` is as it was decided."""
        known = max(overlap.seen_tokens, overlap.available_tokens)
        self._branches.asked(query.keys, known // GRANULE)

    def promise(self, query: Query, candidate: Candidate, now: float) -> Promise:
        """The prompt was booked on a worker."""
        indexed = (candidate.matched_tokens - candidate.promised_tokens) // GRANULE
        return self._promises.make(candidate.worker.id, query.keys, indexed, now)

    def keep(self, promise: Promise, now: float) -> None:
        """The prompt was computed."""
        self._promises.keep(promise, now)

    def break_off(self, promise: Promise) -> None:
        """It was not."""
        self._promises.break_off(promise)

    def served(self, member: Member, request: Served, at: float) -> None:
        """A prompt was computed and answered."""
        self._ghosts.remember(request.keys)
        if self.trust(member)[0] is Trust.EXACT or not request.keys:
            return
        if not member.info.event_feed:
            self.outbox.put(Fact.of(member.id, request))
        self._learn(member, request, at)

    def told(self, member: Member, fact: Fact) -> None:
        """Another gateway saw this worker answer, or restart."""
        if member.info.event_feed:
            return
        if not fact.emptied:
            request = fact.served()
            self._ghosts.remember(request.keys)
            self._learn(member, request, 0.0)
        elif (batch := self._learner.cleared(member.id)) is not None:
            self._index.apply(batch)

    def _learn(self, member: Member, request: Served, at: float) -> None:
        batch = self._learner.served(member.id, request, at)
        if batch is not None:
            self._index.apply(batch)


def _usable(member: Member, granules: int, prompt_tokens: int) -> int:
    """Granules held -> tokens that the worker can reuse: whole blocks, without the last token."""
    if not granules:
        return 0
    whole = granules // member.stride * member.stride * GRANULE
    return usable_tokens(whole, prompt_tokens, member.info.block_size)
