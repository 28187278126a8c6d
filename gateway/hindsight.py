"""Predictions are judged once the events had time to tell what the worker did meanwhile.

A request is decided on what the events have told until then. While it is on its way the worker may
evict what was expected, or store what was not; the events say so, only later than the decision,
and under pressure on memory that is so for most requests. Nothing is wrong with such events, so a
difference between predicted and delivered waits for ``GRACE_S``, and then

    the first missing block was told to be gone since the decision    nothing is compared
    the index holds by now what came unforeseen                       nothing is compared
    the whole contents were told anew since the decision              nothing is compared
    none of these: the events do not describe this cache              it counts as an error

A worker does not tell of blocks that it reuses, so what a cache held without its events' knowledge
is not known afterwards either.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gateway.expectation import Expectation
from gateway.index.base import PrefixIndex
from gateway.member import Member
from gateway.routing.base import Query
from gateway.trust import TrustBook
from gateway.trustwatch import Compared
from shared.blocks import GRANULE, pack_keys
from shared.events import BlocksRemoved, CacheCleared, EventBatch, Snapshot
from shared.types import BlockKey, WorkerId

GRACE_S = 2.0
"""Events come this much later than the answer at most: through Redis, and while a hole in their
sequence is not noticed yet."""
KEPT_KEYS = 16_384
"""Removed keys that are remembered per worker."""
_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A difference that the events may still explain."""

    seen: Compared
    query: Query
    expected: Expectation
    predicted: int
    """What the events had said, in tokens."""
    due: float


@dataclass(slots=True)
class _Past:
    """What one worker's events told of late."""

    removed: deque[tuple[float, bytes]] = field(default_factory=deque)
    """When, and packed keys."""
    size: int = 0
    """Bytes of them."""
    replaced_at: float | None = None
    """When its whole contents were told anew."""
    doubts: deque[_Doubt] = field(default_factory=deque)

    def remove(self, packed: bytes, now: float) -> None:
        self.removed.append((now, packed))
        self.size += len(packed)
        while self.size > KEPT_KEYS * _KEY_BYTES and len(self.removed) > 1:
            self.size -= len(self.removed.popleft()[1])

    def replace(self, now: float) -> None:
        self.removed.clear()
        self.size, self.replaced_at = 0, now

    def took_back(self, key: BlockKey, since: float) -> bool:
        """Pure."""
        sought = pack_keys([key])
        return any(at >= since and _holds(packed, sought) for at, packed in self.removed)


class Hindsight:
    """Hands comparisons on to ``trust``, those that make doubtful a little later."""

    def __init__(self, index: PrefixIndex, trust: TrustBook) -> None:
        self._index, self._trust = index, trust
        self._pasts: dict[WorkerId, _Past] = {}

    def forget(self, worker: WorkerId) -> None:
        """It is gone, or another incarnation."""
        self._pasts.pop(worker, None)

    def heard(self, batch: EventBatch, now: float) -> None:
        """A worker's events were applied."""
        past = self._pasts.get(batch.worker)
        if past is None:
            past = self._pasts[batch.worker] = _Past()
        for event in batch.events:
            if isinstance(event, BlocksRemoved):
                past.remove(event.packed_keys, now)
            elif isinstance(event, Snapshot | CacheCleared):
                past.replace(now)

    def compare(
        self, member: Member, query: Query, expected: Expectation, seen: Compared, now: float
    ) -> None:
        """An answered request."""
        worker = member.id
        past = self._pasts.get(worker)
        if past is not None and past.doubts:
            self.settle(worker, now)
        if expected.version != self._trust.version(worker):
            return  # It was decided on other knowledge than there is now.
        predicted = expected.told
        if predicted is not None and past is not None:
            wrong = seen.error() if expected.place is None else seen.other_error()
            if wrong:
                past.doubts.append(_Doubt(seen, query, expected, predicted, now + GRACE_S))
                return
        self._trust.compare(worker, seen, now)

    def settle(self, worker: WorkerId, now: float) -> None:
        """Count the differences that nothing has explained in time."""
        past = self._pasts.get(worker)
        while past is not None and past.doubts and past.doubts[0].due <= now:
            doubt = past.doubts.popleft()
            current = doubt.expected.version == self._trust.version(worker)
            if current and not self._explained(worker, past, doubt):
                self._trust.compare(worker, doubt.seen, now)

    def _explained(self, worker: WorkerId, past: _Past, doubt: _Doubt) -> bool:
        since, delivered = doubt.expected.decided, doubt.seen.delivered
        if past.replaced_at is not None and past.replaced_at >= since:
            return True
        if delivered > doubt.predicted:
            match = self._index.match(doubt.query.keys).get(worker)
            return match is not None and match.tokens >= delivered
        keys, unit = doubt.query.keys, doubt.expected.stride * GRANULE
        missing = (delivered // unit + 1) * doubt.expected.stride - 1
        return missing < len(keys) and past.took_back(keys[missing], since)


def _holds(packed: bytes, sought: bytes) -> bool:
    at = packed.find(sought)
    while at >= 0 and at % _KEY_BYTES:
        at = packed.find(sought, at + 1)
    return at >= 0
