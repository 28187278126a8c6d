"""The heart, without I/O: what happens on join, leave, load, event, decide, first token, finish.

Time is always an argument, in monotonic seconds; randomness comes from the RNG given at the start.
Rules:
- Work is booked when a worker is selected and released exactly once per attempt, by its lease.
- ``decide`` and ``explain`` change no bookings; only ``begin`` does.
- Redis, sockets and clocks are somebody else's business: whoever follows them calls in here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from random import Random

from gateway.config import RoutingConfig
from gateway.decision import (
    AttemptEnd,
    ModelProfile,
    Overlap,
    Reject,
    Route,
    WorkerStatus,
)
from gateway.index.base import Applied, PrefixIndex
from gateway.records import RequestRecord
from gateway.routing.base import Policy, Query, Trust
from shared.errors import ApiError
from shared.events import EventBatch
from shared.load import WorkerInfo, WorkerLoad
from shared.types import WorkerId

__all__ = [
    "AttemptEnd",
    "Lease",
    "ModelProfile",
    "Overlap",
    "Reject",
    "Route",
    "Router",
    "WorkerStatus",
]


class Lease:
    """One attempt on one worker: booked from ``Router.begin`` until ``finish``."""

    @property
    def worker(self) -> WorkerId:
        """The worker that is being tried."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Its base URL when the attempt began."""
        raise NotImplementedError

    def first_token(self, now: float) -> None:
        """The first content arrived: its prefill is done. Later calls change nothing."""
        raise NotImplementedError

    def finish(self, end: AttemptEnd, now: float) -> RequestRecord:
        """Release what was booked and say what happened. A second call returns the same record."""
        raise NotImplementedError


class Router:
    """Decides which worker serves a request, and remembers what it decided."""

    def __init__(
        self,
        index: PrefixIndex,
        policies: Mapping[str, Policy],
        config: RoutingConfig,
        rng: Random,
    ) -> None:
        raise NotImplementedError

    def join(self, info: WorkerInfo, now: float) -> None:
        """A worker is there. Idempotent; a new epoch means it restarted and holds nothing."""
        raise NotImplementedError

    def leave(self, worker: WorkerId, now: float, reason: str) -> None:
        """A worker is gone; running leases stay valid. Unknown workers are fine."""
        raise NotImplementedError

    def set_health(self, worker: WorkerId, healthy: bool, now: float, reason: str) -> None:
        """Result of a probe."""
        raise NotImplementedError

    def drain(self, worker: WorkerId, now: float) -> bool:
        """No new requests. False: no such worker."""
        raise NotImplementedError

    def undrain(self, worker: WorkerId, now: float) -> bool:
        """New requests again. False: no such worker."""
        raise NotImplementedError

    def set_trust(self, worker: WorkerId, trust: Trust, reason: str, now: float) -> None:
        """How far the index is believed for this worker, and why."""
        raise NotImplementedError

    def apply_load(self, worker: WorkerId, load: WorkerLoad, now: float) -> None:
        """What the worker says about its load."""
        raise NotImplementedError

    def apply_events(self, batch: EventBatch, now: float) -> Applied:
        """Cache events; the caller fetches a snapshot when the answer is not ok."""
        raise NotImplementedError

    def profile(self, model: str) -> ModelProfile | None:
        """How to read prompts for a model name or alias; None: no live worker has it."""
        raise NotImplementedError

    def models(self) -> tuple[str, ...]:
        """All names that live workers answer to, sorted."""
        raise NotImplementedError

    def workers(self, now: float) -> list[WorkerStatus]:
        """All members, sorted by id."""
        raise NotImplementedError

    def worker_url(self, worker: WorkerId) -> str | None:
        """Base URL of a member."""
        raise NotImplementedError

    def ready(self) -> tuple[bool, list[str]]:
        """Whether some worker can take a request, and if not, why not."""
        raise NotImplementedError

    def decide(
        self,
        query: Query,
        now: float,
        *,
        policy: str | None = None,
        exclude: Collection[WorkerId] = (),
    ) -> Route | Reject:
        """Rank the workers for a request. ``exclude``: already tried. Unknown policy: KeyError."""
        raise NotImplementedError

    def explain(self, query: Query, now: float, policy: str | None = None) -> Route | Reject:
        """As :meth:`decide`, without moving the state of a policy or the RNG."""
        raise NotImplementedError

    def begin(self, route: Route, now: float, *, attempt: int) -> Lease:
        """Book the chosen worker (``route.order[0]``). ``attempt`` counts from 1."""
        raise NotImplementedError

    def reject_record(
        self,
        query: Query | None,
        route: str,
        error: ApiError,
        now: float,
        wall_at: float,
    ) -> RequestRecord:
        """The record of a request that reached no worker."""
        raise NotImplementedError
