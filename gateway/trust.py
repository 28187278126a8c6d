"""How far the index is believed for each worker: a state with a reason, and what changes it.

    exact     its own events flow without a gap, and what is predicted from them is delivered
    learned   known from what was routed there and what ``cached_tokens`` said of it
    blind     nothing can be known, and no match is believed

A worker is as trusted as the lowest of these allows:
- what the follower of its feed says (``told``);
- limits that others set, each under a name of its own (tokens that differ, for one);
- itself: predicted and delivered are compared on each request (:mod:`gateway.trustwatch`).
An engine that never reports ``cached_tokens`` cannot be checked: *absent is not 0* until it has
reported something once. Without events it is blind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.decision import WorkerStatus
from gateway.routing.base import BLIND, Trust
from gateway.trustwatch import ENOUGH, MUTE_AFTER, RANK, Compared, Watch
from shared.types import WorkerId

NO_FEED = "no event feed"
_NAMED = 3


@dataclass(frozen=True, slots=True)
class TrustChange:
    """A worker's trust has changed."""

    worker: WorkerId
    before: Trust
    after: Trust
    reason: str

    @property
    def raised(self) -> bool:
        """For the better."""
        return RANK[self.after] > RANK[self.before]


def mistrust(workers: Iterable[WorkerStatus]) -> list[str]:
    """One line for each reason why workers are trusted less than they could be. Pure.

    That a worker has no event feed is how it was chosen, so nothing is wrong with it.
    """
    groups: dict[tuple[Trust, str], list[str]] = {}
    for worker in workers:
        if worker.trust is Trust.BLIND or (
            worker.trust is Trust.LEARNED and worker.trust_reason != NO_FEED
        ):
            groups.setdefault((worker.trust, worker.trust_reason), []).append(worker.id)
    lines = []
    for (trust, reason), names in groups.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(f"prefix knowledge is {trust} ({reason}): {', '.join(names[:_NAMED])}{more}")
    return lines


class TrustBook:
    """The state of all workers. ``on_change`` is told of each change; it must not raise."""

    def __init__(self, on_change: Callable[[TrustChange], None] = lambda change: None) -> None:
        self._on_change = on_change
        self._watches: dict[WorkerId, Watch] = {}
        self.watch: Callable[[WorkerId], Watch | None] = self._watches.get
        """Everything about one worker, to be read only; None: unknown. Pure."""

    def join(self, worker: WorkerId, *, cacheless: bool, reason: str) -> None:
        """A new incarnation: nothing of what was known of it holds."""
        before = self._watches.get(worker)
        watch = Watch(Trust.LEARNED, reason, Trust.LEARNED, reason, cacheless)
        if before is not None:
            watch.state, watch.reported = before.state, before.reported
            watch.version = before.version + 1
        self._watches[worker] = watch
        self._review(worker, watch)

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self._watches.pop(worker, None)

    def of(self, worker: WorkerId) -> tuple[Trust, str]:
        """State and reason. Pure."""
        watch = self._watches.get(worker)
        return (Trust.BLIND, "unknown worker") if watch is None else (watch.state, watch.reason)

    def states(self, worker: WorkerId) -> tuple[Trust, Trust]:
        """State, and what the follower of its feed said last. Pure."""
        watch = self._watches.get(worker)
        return (BLIND, BLIND) if watch is None else (watch.state, watch.told)

    def circumstances(self, worker: WorkerId) -> tuple[Trust, Trust, int]:
        """:meth:`states` and :meth:`version` at once. Pure."""
        watch = self._watches.get(worker)
        return (BLIND, BLIND, 0) if watch is None else (watch.state, watch.told, watch.version)

    def told(self, worker: WorkerId, trust: Trust, reason: str) -> None:
        """The follower of its feed says so."""
        watch = self._watches.get(worker)
        if watch is None or (watch.told is trust and watch.told_reason == reason):
            return
        if watch.told is not trust:
            watch.clear()
            watch.rebuilt = trust is Trust.EXACT
        watch.told, watch.told_reason = trust, reason
        self._review(worker, watch)

    def limit(self, worker: WorkerId, name: str, limit: Trust | None, reason: str) -> None:
        """It is trusted at most so far, for a cause of this name; None lifts it."""
        watch = self._watches.get(worker)
        if watch is None:
            return
        if limit is None:
            watch.limits.pop(name, None)
        else:
            watch.limits[name] = (limit, reason)
        self._review(worker, watch)

    def feed_state(self, worker: WorkerId) -> Trust:
        """What the follower of its feed said last. Pure."""
        watch = self._watches.get(worker)
        return Trust.BLIND if watch is None else watch.told

    def reports(self, worker: WorkerId) -> bool:
        """It has told ``cached_tokens`` once, so that an absent figure means 0. Pure."""
        watch = self._watches.get(worker)
        return watch is not None and watch.reported

    def version(self, worker: WorkerId) -> int:
        """Another number under other circumstances, under which old predictions prove nothing.
        Pure."""
        watch = self._watches.get(worker)
        return 0 if watch is None else watch.version

    def error_share(self, worker: WorkerId) -> float | None:
        """Share of the tokens predicted wrongly of late; None: too little was compared. Pure."""
        watch = self._watches.get(worker)
        if watch is None or len(watch.errors) < ENOUGH:
            return None
        return watch.errors.share

    def answered(self, worker: WorkerId, *, cached: int | None, expected: int) -> bool:
        """What an answer's usage said; ``cached``: None = nothing of the cache. Returns
        :meth:`reports`."""
        watch = self._watches.get(worker)
        if watch is None:
            return False
        if watch.reported:
            return True
        watch.reported = bool(cached)
        watch.unreported += cached is None and expected > 0
        if watch.reported or watch.unreported >= MUTE_AFTER:
            self._review(worker, watch)
        return watch.reported

    def compare(self, worker: WorkerId, seen: Compared, now: float) -> None:
        """Predicted against delivered, of one answered request."""
        watch = self._watches.get(worker)
        if watch is not None:
            before = watch.lowered
            watch.compare(seen, now)
            if watch.lowered is not before:
                self._review(worker, watch)

    def _review(self, worker: WorkerId, watch: Watch) -> None:
        before = watch.state
        watch.state, watch.reason = watch.now_is()
        if watch.state is not before:
            watch.clear()
            self._on_change(TrustChange(worker, before, watch.state, watch.reason))
