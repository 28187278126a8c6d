"""What is learned of workers from what they answer, and where in the index it stands.

Of a worker without believed events it stands under the worker's own name. While events flow but are
not believed (its predictions fail, or the prompt is known as text only) it stands beside them,
under a name of its own: neither spoils the other, and both can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.index.base import PrefixIndex
from gateway.learn import Learner, Served
from gateway.learned import Fact, Outbox
from gateway.member import Member
from gateway.routing.base import EXACT, Trust
from shared.types import BlockKey, WorkerId


def aside(worker: WorkerId) -> WorkerId:
    """Under this name stands what was learned of a worker while its events are not believed."""
    return WorkerId(f"{worker}\0learned")


def place_of(worker: WorkerId, state: Trust, told: Trust, *, text: bool) -> WorkerId | None:
    """Where in the index what a worker holds is learned; None: its events tell."""
    if told is not EXACT:
        return worker
    return None if state is EXACT and not text else aside(worker)


class LearnedPlaces:
    """Drives the learner, and the index with what it learns."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index, self._learner = index, Learner()
        self.outbox = Outbox()
        """What the other gateways should know about workers without cache events."""

    def begin(self, member: Member) -> None:
        """A new incarnation: nothing that was learned holds."""
        if self._learner.knows(member.id) and not member.info.event_feed:
            self.outbox.put(Fact(member.id, b""))
        self.empty(member)

    def empty(self, member: Member) -> None:
        """Learn anew. The index is emptied by whoever calls."""
        self._learner.join(member.id, member.stride, member.kv_tokens_total())
        self.leave_aside(member.id)

    def attach(self, member: Member) -> None:
        """The worker has joined the index."""
        if not member.info.event_feed:
            # Of one with a feed events may take back what was learned, key by key.
            self._index.attach(member.id, self._learner.contents(member.id))

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self._learner.forget(worker)
        self.leave_aside(worker)

    def leave_aside(self, worker: WorkerId) -> None:
        """Nothing is learned beside its events any more."""
        place = aside(worker)
        if self._learner.knows(place):
            self._learner.forget(place)
            self._index.forget(place)

    def give_way(self, worker: WorkerId) -> None:
        """Its own events have replaced what was learned."""
        self._learner.reset(worker)

    def resize(self, member: Member) -> None:
        """A worker may have told its capacity."""
        for place in (member.id, aside(member.id)):
            self._learner.resize(place, member.kv_tokens_total())

    def capacity_tokens(self, place: WorkerId) -> int:
        """What a cache is believed to hold. Pure."""
        return self._learner.capacity_tokens(place)

    def clock(self, place: WorkerId) -> int | None:
        """Grows with each request from which was learned there. Pure."""
        return self._learner.clock(place)

    def served(self, member: Member, place: WorkerId, request: Served) -> None:
        """A prompt was answered; others are told where they cannot see it themselves."""
        if self.outbox.open and not member.info.event_feed:
            self.outbox.put(Fact.of(member.id, request))
        self._learn(member, place, request)

    def told(self, member: Member, fact: Fact) -> Sequence[BlockKey]:
        """Another gateway saw this worker answer, or restart; returns the prompt's keys."""
        if member.info.event_feed:
            return ()
        if not fact.emptied:
            request = fact.served(self._learner.clock(member.id))
            self._learn(member, member.id, request)
            return request.keys
        if (change := self._learner.cleared(member.id)) is not None:
            self._index.learn(member.id, change)
        return ()

    def _learn(self, member: Member, place: WorkerId, request: Served) -> None:
        if place != member.id and not self._learner.knows(place):
            self._learner.join(place, member.stride, member.kv_tokens_total())
            self._index.join(place, member.info.epoch, member.stride)
            self._index.attach(place, self._learner.contents(place))
        change = self._learner.served(place, request)
        if change is not None:
            self._index.learn(place, change)
